"""A daemon that also listens at a socket of its own. What is counted is counted over it and its
workers."""
import os
import tempfile
import time

from daemon import Daemon


class SocketDaemon(Daemon):
    def __init__(self, program, *options):
        self.folder = tempfile.TemporaryDirectory()
        self.path = self.folder.name + "/run/dropkvd.sock"
        super().__init__(program, "--socket", self.path, *options)

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self.folder.cleanup()

    def processes(self):
        """The daemon and its workers."""
        pid = self.process.pid
        with open("/proc/%d/task/%d/children" % (pid, pid), encoding="ascii") as file:
            return [pid, *(int(word) for word in file.read().split())]

    def n_fds(self):
        return sum(len(os.listdir("/proc/%d/fd" % pid)) for pid in self.processes())

    def n_maps(self):
        """Mappings of memfds of clients."""
        count = 0
        for pid in self.processes():
            with open("/proc/%d/maps" % pid, encoding="ascii") as file:
                count += sum("memfd:test" in line for line in file)
        return count

    def total_rss_kib(self):
        total = 0
        for pid in self.processes():
            with open("/proc/%d/status" % pid, encoding="ascii") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
        return total

    def wait_until_clean(self, n_fds, within_s=1.0):
        deadline = time.monotonic() + within_s
        while self.n_fds() != n_fds or self.n_maps() != 0:
            if time.monotonic() > deadline:
                raise AssertionError("%d fds, %d before; %d mappings" % (self.n_fds(), n_fds, self.n_maps()))
