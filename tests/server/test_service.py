"""The daemon under a service manager: what it says, the sockets it is handed, who may use them, how it
leaves.

usage: test_service.py DROPKVD

The manager is played by this test, with systemd's protocols (sd_notify(3), sd_listen_fds(3)).
"""
import os
import signal
import socket
import stat
import struct
import sys
import tempfile
import unittest

import wire
from daemon import Daemon, infer_request, is_closed, read_reply, request
from wire import Client

DROPKVD = sys.argv.pop(1)
NOBODY, STRANGERS, MEMBERS = 65534, 64001, 64002

# Puts the descriptors named first at 3 and up, and says so to the program that it becomes.
LAUNCH = """
import os, sys
fds = [int(word) for word in sys.argv[1].split(",")]
for i, fd in enumerate(fds):
    os.dup2(fd, 3 + i)
os.environ["LISTEN_FDS"] = str(len(fds))
os.environ["LISTEN_PID"] = str(os.getpid() + int(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""


class Manager:
    """Receives what the daemon says."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(30)

    def hear(self):
        """{name: value} of the next message."""
        return dict(line.split("=", 1) for line in self.socket.recv(4096).decode().split("\n"))

    def hear_but(self, name):
        """The next message that is not of that name."""
        while True:
            said = self.hear()
            if name not in said:
                return said

    def is_silent(self, for_s):
        self.socket.settimeout(for_s)
        try:
            self.socket.recv(4096)
            return False
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(30)


class ManagedDaemon(Daemon):
    def __init__(self, environment, *options, launcher=(), fds=()):
        self.launcher = launcher
        self.popen_options = {"env": {**os.environ, **environment}, "pass_fds": fds}
        super().__init__(DROPKVD, *options)

    def worker(self):
        pid = self.process.pid
        with open("/proc/%d/task/%d/children" % (pid, pid), encoding="ascii") as file:
            return int(file.read().split()[0])


def hand_over(sockets, *options, pid_offset=0):
    """A daemon that is handed these sockets. They are moved out of the way of the numbers they will have."""
    import fcntl
    fds = [fcntl.fcntl(s.fileno(), fcntl.F_DUPFD, 100) for s in sockets]
    try:
        return ManagedDaemon({}, *options, fds=fds,
                             launcher=(sys.executable, "-c", LAUNCH, ",".join(map(str, fds)), str(pid_offset)))
    finally:
        for fd in fds:
            os.close(fd)


def listening(family, address):
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen()
    return listener


class Notification(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.address = folder.name + "/notify"
        self.manager = Manager(self.address)
        self.addCleanup(self.manager.socket.close)

    def test_start_reload_and_stop_are_said(self):
        with ManagedDaemon({"NOTIFY_SOCKET": self.address}) as daemon:
            said = self.manager.hear()
            self.assertEqual(said["READY"], "1")
            self.assertIn("cpu", said["STATUS"])
            self.assertEqual(daemon.get("/v2/health/ready").status, 200)
            daemon.process.send_signal(signal.SIGHUP)
            said = self.manager.hear()
            self.assertEqual(said["RELOADING"], "1")
            self.assertGreater(int(said["MONOTONIC_USEC"]), 0)
            self.assertEqual(self.manager.hear(), {"READY": "1"})
            daemon.process.send_signal(signal.SIGTERM)
            self.assertEqual(self.manager.hear()["STOPPING"], "1")
            self.assertEqual(daemon.wait(), 0)

    def test_an_abstract_address_is_reached(self):
        name = "dropkvd-test-%d" % os.getpid()
        manager = Manager("\0" + name)
        self.addCleanup(manager.socket.close)
        with ManagedDaemon({"NOTIFY_SOCKET": "@" + name}):
            self.assertEqual(manager.hear()["READY"], "1")

    def test_a_failed_start_says_why_and_never_ready(self):
        with self.assertRaises(AssertionError):
            ManagedDaemon({"NOTIFY_SOCKET": self.address}, "--device", "cuda:99")
        said = self.manager.hear()
        self.assertIn("cannot start", said["STATUS"])
        self.assertNotIn("READY", said)

    def test_workers_cannot_speak_for_the_daemon(self):
        with ManagedDaemon({"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": "1000000"}) as daemon:
            with open("/proc/%d/environ" % daemon.worker(), "rb") as file:
                names = {entry.split(b"=")[0] for entry in file.read().split(b"\0")}
            self.assertFalse(names & {b"NOTIFY_SOCKET", b"WATCHDOG_USEC", b"LISTEN_FDS"})

    def test_the_watchdog_is_fed_while_the_worker_answers_and_not_otherwise(self):
        with ManagedDaemon({"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": "400000"}) as daemon:
            self.manager.hear_but("WATCHDOG")
            for _ in range(3):
                self.assertEqual(self.manager.hear(), {"WATCHDOG": "1"})
            self.assertEqual(daemon.ask(infer_request()).status, 200)
            self.assertEqual(self.manager.hear(), {"WATCHDOG": "1"})
            os.kill(daemon.worker(), signal.SIGSTOP)
            # What the worker had answered before is still told; then nothing is, four times in a row.
            self.assertTrue(any(self.manager.is_silent(0.4) for _ in range(20)))
            daemon.wait_for_log("no sign of life: a worker is silent")
            os.kill(daemon.worker(), signal.SIGCONT)
            said = self.manager.hear()
            self.assertEqual(said["WATCHDOG"], "1")
            self.assertIn("serving", said["STATUS"])

    def test_the_watchdog_is_not_fed_while_no_device_answers(self):
        environment = {"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": "200000", "DROPKVD_DIE_AT": "run:1"}
        with ManagedDaemon(environment, "--test-hooks", "--worker-deaths", "2") as daemon:
            daemon.ask(infer_request())  # its worker dies, and the next one
            daemon.wait_for_log("the device is given up")
            daemon.wait_for_log("no sign of life: no device answers")
            while "no device answers" not in self.manager.hear().get("STATUS", ""):
                pass

    def test_a_watchdog_of_another_process_is_none_of_ours(self):
        environment = {"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
        with ManagedDaemon(environment) as daemon:
            daemon.process.send_signal(signal.SIGTERM)
            said = [self.manager.hear(), self.manager.hear()]
            self.assertEqual([list(s)[0] for s in said], ["READY", "STOPPING"])
            daemon.wait()


class InheritedSockets(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = folder.name + "/dropkvd.sock"

    def listen(self, family, address):
        listener = listening(family, address)
        self.addCleanup(listener.close)
        return listener

    def test_both_fronts_are_served_and_the_file_stays(self):
        http = self.listen(socket.AF_INET, ("127.0.0.1", 0))
        local = self.listen(socket.AF_UNIX, self.path)
        early = socket.create_connection(http.getsockname())  # before anybody serves
        early.sendall(request("GET", "/v2/health/ready"))
        with hand_over([local, http]) as daemon:
            self.assertEqual(daemon.port, http.getsockname()[1])
            self.assertEqual(read_reply(early).status, 200)
            early.close()
            self.assertEqual(daemon.ask(infer_request()).status, 200)
            with Client(self.path):  # says hello and is greeted
                pass
        self.assertTrue(stat.S_ISSOCK(os.stat(self.path).st_mode))

    def refused(self, sockets, *options):
        with self.assertRaises(AssertionError) as caught:
            hand_over(sockets, *options)
        return str(caught.exception)

    def test_an_open_address_is_refused_as_one_of_the_configuration_is(self):
        http = self.listen(socket.AF_INET, ("0.0.0.0", 0))
        self.assertIn("not a loopback address; that needs token_file", self.refused([http]))

    def test_what_is_no_listening_stream_is_refused(self):
        datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.addCleanup(datagram.close)
        self.assertIn("descriptor 3 is not a listening stream socket", self.refused([datagram]))

    def test_two_of_a_kind_are_refused(self):
        pair = [self.listen(socket.AF_INET, ("127.0.0.1", 0)) for _ in range(2)]
        self.assertIn("descriptors 3 and 4 are both internet sockets", self.refused(pair))

    def test_sockets_of_another_process_are_none_of_ours(self):
        http = self.listen(socket.AF_INET, ("127.0.0.1", 0))
        with hand_over([http], pid_offset=1) as daemon:
            self.assertNotEqual(daemon.port, http.getsockname()[1])


@unittest.skipIf(os.geteuid() != 0, "needs root to be other users")
class Group(unittest.TestCase):
    """Members of the socket's group come in; nobody else does."""

    HELLO = wire.header(wire.HELLO, 1, struct.pack("<IHHII", wire.MAGIC, 1, 1, 0x1F, 0))

    RESULTS = ("in", "closed", "denied", "failed")

    def visit(self, path):
        """'in', 'closed' (let connect, then shut) or 'denied' (by the file's mode)."""
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.settimeout(30)
            try:
                visitor.connect(path)
            except PermissionError:
                return "denied"
            try:
                visitor.sendall(self.HELLO)
                return "in" if visitor.recv(4096) else "closed"
            except (BrokenPipeError, ConnectionResetError):
                return "closed"

    def try_as(self, path, group, extra=()):
        """A visit by nobody of that group, in a process of its own."""
        pid = os.fork()
        if pid == 0:
            result = "failed"
            try:
                os.setgroups(extra)
                os.setgid(group)
                os.setuid(NOBODY)
                result = self.visit(path)
            finally:
                os._exit(self.RESULTS.index(result))
        return self.RESULTS[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]

    def folder(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        os.chmod(folder.name, 0o755)
        return folder.name

    def test_members_may_connect_and_others_may_not(self):
        path = self.folder() + "/run/dropkvd.sock"
        with ManagedDaemon({}, "--socket", path, "--socket-group", str(MEMBERS)):
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o660)
            self.assertEqual(stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode), 0o750)
            self.assertEqual(self.try_as(path, MEMBERS), "in")
            self.assertEqual(self.try_as(path, STRANGERS, [MEMBERS]), "in")
            self.assertEqual(self.try_as(path, STRANGERS), "denied")

    def test_a_socket_that_anybody_can_reach_lets_members_in_alone(self):
        path = self.folder() + "/dropkvd.sock"
        local = listening(socket.AF_UNIX, path)
        self.addCleanup(local.close)
        os.chmod(path, 0o666)
        with hand_over([local], "--socket-group", str(MEMBERS)) as daemon:
            self.assertEqual(self.try_as(path, STRANGERS, [MEMBERS]), "in")
            self.assertEqual(self.try_as(path, STRANGERS), "closed")
            daemon.wait_for_log("user %d may not connect" % NOBODY)

    def test_legacy_handles_are_for_the_daemons_own_user(self):
        """They carry no rights; descriptors do, and are refused here for want of a GPU alone."""
        path = self.folder() + "/run/dropkvd.sock"
        legacy = wire.region(64, kind=2, uuid=b"u" * 16, handle=b"h" * 64)
        chunks = wire.region(64, kind=3, uuid=b"u" * 16, chunks=[(0, 64)])
        with ManagedDaemon({}, "--socket", path, "--socket-group", str(MEMBERS)):
            pid = os.fork()
            if pid == 0:
                result = 1
                try:
                    os.setgroups([])
                    os.setgid(MEMBERS)
                    os.setuid(NOBODY)
                    with wire.Client(path) as client, open("/dev/null", "rb") as file:
                        denied, text = client.ask(wire.REGION_ADD, legacy).error()
                        unsupported, _ = client.ask(wire.REGION_ADD, chunks, fds=[file.fileno()]).error()
                    result = not (denied == wire.DENIED and "own user" in text and unsupported == wire.UNSUPPORTED)
                finally:
                    os._exit(result)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)

    def test_an_unknown_group_is_refused_by_name(self):
        with self.assertRaisesRegex(AssertionError, "socket_group: 'no-such-group' is neither"):
            ManagedDaemon({}, "--socket", self.folder() + "/run/s", "--socket-group", "no-such-group")


class Leaving(unittest.TestCase):
    def test_in_the_delay_readiness_says_no_and_requests_are_answered(self):
        with Daemon(DROPKVD, "--drain-delay-ms", "3600000") as daemon:
            idle = daemon.connect()
            idle.sendall(request("GET", "/v2/health/ready"))
            self.assertEqual(read_reply(idle).status, 200)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for_log("leaving")
            self.assertEqual(daemon.get("/v2/health/ready").status, 400)
            self.assertEqual(daemon.get("/v2/health/live").status, 200)
            metrics = daemon.metrics()
            self.assertEqual((metrics["dropkv_ready"], metrics["dropkv_draining"]), (0, 1))
            reply = daemon.ask(infer_request())
            self.assertEqual(reply.status, 200)
            self.assertEqual(reply.fields["connection"].lower(), "close")
            idle.sendall(infer_request())  # kept open, so that a proxy's next request is not lost
            self.assertEqual(read_reply(idle).status, 200)
            self.assertTrue(is_closed(idle, 10))
            idle.close()
            daemon.process.send_signal(signal.SIGTERM)  # ends the delay
            self.assertEqual(daemon.wait(), 0)

    def test_the_delay_ends_by_itself(self):
        with Daemon(DROPKVD, "--drain-delay-ms", "20") as daemon:
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for_log("draining, 0 requests")
            self.assertEqual(daemon.wait(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
