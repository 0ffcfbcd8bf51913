/* Runs the admission queue through seeded scenarios on a virtual clock.
 *
 * usage: sim_admission [--seeds N] [--first N] [--jobs N]    N seeds over N processes
 *        sim_admission --seed N [--verbose]                  one seed, replayed
 *
 * Exit 0 if every promise held in every seed. A failure prints the seed and the promise.
 * DKV_SANITIZED=1 in the environment: a twentieth of the seeds, since each takes longer.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/server/sim.h"

struct totals {
    uint64_t seeds, steps, offers, accepted, ok, timeout, cancelled, failed, batches, parts,
        replayed;
};

static struct sim sim; /* 400 KiB: not on the stack */

static void add(struct totals *t)
{
    t->seeds++;
    t->steps += sim.steps;
    t->offers += sim.n_offered;
    t->accepted += sim.verdicts[DKV_ADMISSION_ACCEPTED];
    t->ok += sim.ended_ok;
    t->timeout += sim.ended_timeout;
    t->cancelled += sim.ended_cancelled;
    t->failed += sim.ended_failed;
    t->batches += sim.n_batches;
    t->parts += sim.n_parts_launched;
    t->replayed += sim.n_replayed;
}

static void report_failure(uint64_t seed)
{
    fprintf(stderr, "seed %llu (%s), step %llu, %llu us: %s\n", (unsigned long long)seed,
            sim.scenario.name, (unsigned long long)sim.steps, (unsigned long long)sim.now_us,
            sim.why);
    fprintf(stderr, "replay with: sim_admission --seed %llu --verbose\n", (unsigned long long)seed);
}

/* Every n_jobs-th seed from `first`; totals go to the pipe. */
static int run_share(uint64_t first, uint64_t end, uint64_t n_jobs, int fd)
{
    struct totals totals = {0};

    for (uint64_t seed = first; seed < end; seed += n_jobs) {
        if (sim_run(&sim, seed, false) != 0) {
            report_failure(seed);
            return 1;
        }
        add(&totals);
    }
    return write(fd, &totals, sizeof(totals)) == (ssize_t)sizeof(totals) ? 0 : 1;
}

static void sum_up(struct totals *sum, const struct totals *t)
{
    const uint64_t *from = (const uint64_t *)t;
    uint64_t *to = (uint64_t *)sum;
    for (size_t i = 0; i < sizeof(*t) / sizeof(*from); i++)
        to[i] += from[i];
}

static int run_all(uint64_t first, uint64_t n_seeds, uint64_t n_jobs)
{
    struct totals sum = {0}, one;
    int fds[2], bad = 0;

    if (pipe(fds) != 0)
        return 1;
    for (uint64_t i = 0; i < n_jobs; i++) {
        const pid_t pid = fork();
        if (pid == 0)
            _exit(run_share(first + i, first + n_seeds, n_jobs, fds[1]));
        if (pid < 0)
            return 1;
    }
    close(fds[1]);
    while (read(fds[0], &one, sizeof(one)) == (ssize_t)sizeof(one))
        sum_up(&sum, &one);
    for (int status; wait(&status) > 0;)
        bad |= !WIFEXITED(status) || WEXITSTATUS(status) != 0;

    printf("%llu seeds, %llu steps: %llu offers, %llu accepted: %llu ok, %llu timeout, %llu"
           " cancelled, %llu failed; %llu batches of %llu parts, %llu replayed\n",
           (unsigned long long)sum.seeds, (unsigned long long)sum.steps,
           (unsigned long long)sum.offers, (unsigned long long)sum.accepted,
           (unsigned long long)sum.ok, (unsigned long long)sum.timeout,
           (unsigned long long)sum.cancelled, (unsigned long long)sum.failed,
           (unsigned long long)sum.batches, (unsigned long long)sum.parts,
           (unsigned long long)sum.replayed);
    return bad || sum.seeds != n_seeds;
}

static int run_one(uint64_t seed, bool verbose)
{
    if (sim_run(&sim, seed, verbose) != 0) {
        report_failure(seed);
        return 1;
    }
    printf("seed %llu (%s): every promise held in %llu steps\n", (unsigned long long)seed,
           sim.scenario.name, (unsigned long long)sim.steps);
    return 0;
}

static uint64_t default_jobs(void)
{
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint64_t)n : 1;
}

static int usage(void)
{
    fprintf(stderr, "usage: sim_admission [--seeds N] [--first N] [--jobs N]\n"
                    "       sim_admission --seed N [--verbose]\n");
    return 64;
}

int main(int argc, char **argv)
{
    uint64_t n_seeds = 100000, first = 0, n_jobs = default_jobs(), seed = 0;
    bool one = false, verbose = false;

    for (int i = 1; i < argc; i++) {
        const bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--verbose") == 0)
            verbose = true;
        else if (strcmp(argv[i], "--seeds") == 0 && has_value)
            n_seeds = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--first") == 0 && has_value)
            first = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--jobs") == 0 && has_value)
            n_jobs = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0 && has_value) {
            one = true;
            seed = strtoull(argv[++i], NULL, 10);
        } else {
            return usage();
        }
    }
    if (one)
        return run_one(seed, verbose);
    if (n_seeds == 0 || n_jobs == 0 || n_jobs > 1024)
        return usage();
    if (getenv("DKV_SANITIZED") != NULL)
        n_seeds = n_seeds / 20 + 1;
    return run_all(first, n_seeds, n_jobs);
}
