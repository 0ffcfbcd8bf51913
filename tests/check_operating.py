"""docs/operating.md tells of every option, metric, outcome and status that the daemon has, and of none that it
has not; its "live" column is what a reload takes.

usage: check_operating.py OPERATING.md DROPKVD TYPES.c RELOAD.c
"""
import json
import re
import subprocess
import sys

sys.path.insert(0, __file__.rsplit("/", 1)[0] + "/server")
from daemon import Daemon  # noqa: E402 (found beside this file)


def main(page, program, types, reload_source):
    with open(page, encoding="utf-8") as file:
        text = file.read()
    with open(types, encoding="ascii") as file:
        statuses = set(re.findall(r'\{DKV_\w+, "([A-Z_]+)"', file.read()))
    with open(reload_source, encoding="ascii") as file:
        live = set(re.findall(r'^    "(\w+)",$', file.read(), re.M))
    fields = json.loads(subprocess.run([program, "--print-config"], check=True, capture_output=True).stdout)
    with Daemon(program, "--nv-metrics") as daemon:
        metrics = daemon.get("/metrics").body.decode()
    families = set(re.findall(r"^# TYPE (\S+)", metrics, re.M))

    wrong = []
    told_names = set(re.findall(r"`(\w+)(?:\{\w+\})?`", text))
    wrong += ["metric %s is not told of" % name for name in families - told_names]
    wrong += ["metric %s does not exist" % name for name in told_names
              if re.match(r"(dropkv|nv_inference|process)_\w", name) and name not in families]
    for family, label in set(re.findall(r"^(dropkv_\w+)\{(?!worker|priority|le|version|backend|kind)(\w+)=", metrics, re.M)):
        for value in set(re.findall(r'^%s\{%s="([^"]+)"' % (family, label), metrics, re.M)):
            row = next((line for line in text.splitlines() if "`%s{%s}`" % (family, label) in line), "")
            if label != "class" and label != "transport" and not re.search(r"\b%s\b" % value, row):
                wrong.append("%s{%s}: nothing about %s" % (family, label, value))

    rows = [line.split("|") for line in text[text.index("## What can be set"):].splitlines() if line.startswith("| `")]
    told = {}
    for row in rows:
        names = re.findall(r"`(\w+)`", row[1])
        defaults = [part.strip() for part in row[2].split(",")]
        for i, name in enumerate(names):
            told[name] = (defaults[min(i, len(defaults) - 1)], row[3].strip())
    wrong += ["option %s is not told of" % name for name in fields.keys() - told.keys()]
    wrong += ["option %s does not exist" % name for name in told.keys() - fields.keys()]
    for name, (default, mark) in told.items():
        number = re.fullmatch(r"(\d+)(KiB|MiB|GiB|TiB)?", default)
        value = default if not number else \
            int(number[1]) << {None: 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[number[2]]
        if name in fields and str(fields[name]).lower() not in (str(value).lower(), ""):
            wrong.append("%s: default %s, told is %s" % (name, fields[name], default))
        if (mark in ("yes", "≤")) != (name in live):
            wrong.append("%s: live is told as '%s', a reload says %s" % (name, mark, name in live))

    told_statuses = set(re.findall(r"^\| ([A-Z_]+) \| \d", text, re.M))
    wrong += ["status %s" % name for name in statuses ^ told_statuses]
    for line in wrong:
        print(line)
    print("operating: %d options, %d metrics, %d statuses" % (len(fields), len(families), len(statuses)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
