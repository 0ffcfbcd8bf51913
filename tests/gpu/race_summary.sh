#!/bin/sh
# Counts what racecheck has reported: by kernel, and by where the accesses are.
#
# usage: race_summary.sh LOG [KNOWN PATTERNS]
#
# LOG is of compute-sanitizer --tool racecheck, report analysis or all. A line each: reports, hazards
# (bytes, about), the function and line of the first access, those of the others. Remote accesses to
# a block that may not be there have no hazards. Then reports of each function, the tool's own
# summary, and what it says of its limits.
#
# With KNOWN (race_known.txt) and the PATTERNS that the tool reports by themselves, each line begins
# with the pattern that explains it, or with NEW, and the exit status is 1 if one is new.
set -eu
awk -v known="${2:-}" -v patterns="${3:-}" '
    BEGIN {
        judges = known != ""
        while (judges && (getline line < known) > 0) {
            if (line ~ /^#/ || split(line, word) != 3 || !index(" " patterns " ", " " word[3] " "))
                continue
            excuse[word[1], word[2]] = word[3]
        }
    }
    # The pattern that explains an access by a writer and one by a reader, or none.
    function explains(writer, reader) {
        return (writer, reader) in excuse ? excuse[writer, reader] : \
            (writer, "*") in excuse ? excuse[writer, "*"] : ""
    }
    # "Write F FILE:LINE; Read G FILE:LINE; .." -> what explains all of its pairs, or NEW
    function judgement(report,    part, first, other, n, i, why, all) {
        n = split(report, part, "; ")
        split(part[1], first, " ")
        for (i = 2; i <= n; i++) {
            split(part[i], other, " ")
            why = first[1] == "Write" ? explains(first[2], other[2]) : explains(other[2], first[2])
            if (why == "" || (all != "" && why != all))
                return "NEW"
            all = why
        }
        return n < 2 ? "NEW" : all
    }
    # "Write access at NAME+0x1f0 in FILE:LINE [N hazards]" -> "Write NAME FILE:LINE"
    function place(line,    kind, at) {
        kind = line ~ /Write access at/ ? "Write " : line ~ /Read access at/ ? "Read " : ""
        sub(/^=+ +/, "", line)
        sub(/^.*access at /, "", line)
        sub(/^at /, "", line)
        sub(/ \[[0-9]+ hazards?\].*/, "", line)
        at = line
        if (!sub(/^.* in /, "", at))
            at = ""
        sub(/ in [^ ]*$/, "", line)
        sub(/\+0x[0-9a-f]+.*/, "", line)
        gsub(/\(anonymous namespace\)::/, "", line)
        gsub(/\((int|bool|unsigned int)\)/, "", line)
        sub(/\(.*/, "", line)
        sub(/^void /, "", line)
        name = line
        return kind line (at == "" ? "" : " " at)
    }
    function hazards_in(line) {
        return match(line, /\[[0-9]+ hazard/) ? substr(line, RSTART + 1, RLENGTH - 8) + 0 : 0
    }
    function close_report() {
        if (report == "")
            return
        reports[report]++
        hazards[report] += n
        of[kernel]++
        report = ""
    }
    /Race reported between/ {
        close_report()
        report = place($0)
        kernel = name
        n = hazards_in($0)
        next
    }
    report != "" && /and (Read|Write) access at/ {
        report = report "; " place($0)
        n += hazards_in($0)
        next
    }
    report != "" && /Device Frame:/ { # of what is inlined; the last one is the kernel
        sub(/Device Frame:/, "access at ")
        place($0)
        kernel = name
        next
    }
    /Potential invalid __shared__/ {
        close_report()
        sub(/^=+ +/, "")
        remote = $0
        next
    }
    remote != "" && / at / {
        report = place($0)
        kernel = name
        report = remote ": " report
        n = 0
        remote = ""
        next
    }
    report != "" && /might (not have entered|have already exited)/ {
        report = report ($0 ~ /exited/ ? " (may have exited)" : " (may not have entered)")
        close_report()
        next
    }
    /RACECHECK SUMMARY|[Ww]arning: (Detected overflow|Maximum number)/ { said[$0] = 1 }
    END {
        close_report()
        for (r in reports) {
            why = judges ? judgement(r) : ""
            new = new || why == "NEW"
            order = judges ? "sort -k 4,4nr -k 6" : "sort -k 3,3nr -k 5"
            printf "%s%6d reports %9d hazards  %s\n", judges ? why " " : "", reports[r], hazards[r],
                r | order
        }
        if (order != "")
            close(order)
        for (k in of)
            printf "%6d reports in %s\n", of[k], k | "sort -nr"
        close("sort -nr")
        for (s in said)
            print s
        exit new
    }' "$1"
