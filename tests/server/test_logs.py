"""The log, traces and SIGHUP of a real daemon.

usage: test_logs.py DROPKVD
"""
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import wire
from daemon import INFER, Daemon, infer_body, infer_request, request
from socket_daemon import SocketDaemon
from wire import Client

DROPKVD = sys.argv.pop(1)
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def traceparent(flags="01", version="00"):
    return "traceparent: %s-%s-%s-%s" % (version, TRACE, PARENT, flags)


def named(name, fields=(), **parameters):
    """A request of a stream and with an id of its own."""
    head, data = infer_body(parameters={"keep_ratio": 0.25, "stream": name, **parameters})
    head = json.dumps({"id": "mine-7", **json.loads(head)}).encode()
    return request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(head), *fields], head + data)


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text, mode=0o644):
        with open(self.path(name), "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(self.path(name), mode)
        return self.path(name)

    def lines(self, name):
        with open(self.path(name), encoding="ascii") as file:
            return file.read().splitlines()


class Lines(Folder):
    def test_a_request_is_one_line_with_its_names_sizes_and_times(self):
        with Daemon(DROPKVD, "--log-level", "debug") as daemon:
            self.assertEqual(daemon.ask(named("chat-7", [traceparent()])).status, 200)
            line = daemon.wait_for_log(r"answered request 1: (.*)").group(1)
        fields = dict(part.split(" ") for part in line.split(", "))
        self.assertEqual(fields["outcome"], "ok")
        self.assertEqual(fields["transport"], "http")
        self.assertEqual(fields["stream"], "chat-7")
        self.assertEqual(fields["id"], "mine-7")
        self.assertEqual(fields["traceparent"], traceparent().split(" ")[1])
        self.assertEqual((fields["blocks"], fields["tokens"], fields["kept"]), ("1", "64", "16"))
        self.assertEqual(int(fields["bytes"]), 2 * 8 * 8 * 4 + 2 * 64 * 8 * 4)
        self.assertGreaterEqual(int(fields["total_us"]), int(fields["queue_us"]) + int(fields["device_us"]))

    def test_json_has_the_same_as_members(self):
        with SocketDaemon(DROPKVD, "--log-level", "debug", "--log-format", "json") as daemon, \
                Client(daemon.path) as client:
            data = infer_body(tokens=16)[1]
            views = [wire.view(0, 0, 32, 8 * 32), wire.view(0, 512, 32, 512), wire.view(0, 1024, 32, 512)]
            params = wire.real(wire.KEEP_RATIO, 0.25) + wire.text(wire.STREAM, "s.1")
            client.ask(wire.SCORE_BLOCKS, wire.score_blocks([wire.block(views, tokens=16)], params), data).keep()
            line = json.loads(daemon.wait_for_log("answered request").string)
            for text in daemon.log:
                if text != "(end of log)":
                    json.loads(text)
        self.assertEqual((line["level"], line["outcome"], line["transport"]), ("debug", "ok", "socket"))
        self.assertEqual(line["session"], 1)
        self.assertTrue(any("session 1: user %d has connected" % os.getuid() in text for text in daemon.log))
        self.assertTrue(any("session 1: ended, 0 regions" in text for text in daemon.log))
        self.assertEqual((line["stream"], line["blocks"], line["tokens"], line["kept"]), ("s.1", 1, 16, 8))
        for name in ("queue_us", "device_us", "total_us", "bytes"):
            self.assertIsInstance(line[name], int)

    def test_nothing_is_said_of_requests_by_default_but_what_failed_for_want_of_us(self):
        with Daemon(DROPKVD) as daemon:
            self.assertEqual(daemon.ask(named("quiet")).status, 200)
            self.assertEqual(daemon.ask(named("wrong", window=0)).status, 400)
            self.assertEqual(daemon.ask(named("late", timeout=1)).status, 503)
            line = daemon.wait_for_log("request 3 ended without an answer, (.*)").string
            log = "\n".join(daemon.log)
        self.assertIn(" info ", line)
        self.assertIn("outcome timeout", line)
        self.assertIn("stream late", line)
        self.assertNotIn("quiet", log)
        self.assertNotIn("wrong", log)

    def test_lines_that_clients_cause_are_held_back_and_counted(self):
        with Daemon(DROPKVD) as daemon:
            for _ in range(60):
                self.assertEqual(daemon.ask(named("late", timeout=1)).status, 503)
            lines = [line for line in daemon.log if "ended without an answer" in line]
            held_back = daemon.metrics()["dropkv_log_lines_held_back_total"]
        self.assertLess(len(lines), 30)
        self.assertEqual(len(lines) + held_back, 60)

    def test_client_text_cannot_make_a_line(self):
        head, data = infer_body()
        head = json.dumps({"id": "a\r\nb\x1b[31m\"", **json.loads(head)}).encode()
        raw = request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(head)], head + data)
        for form in ("text", "json"):
            with Daemon(DROPKVD, "--log-level", "debug", "--log-format", form) as daemon:
                daemon.ask(raw)
                daemon.metrics()
                for line in daemon.log:
                    self.assertTrue(all(0x20 <= ord(c) < 0x7F for c in line), repr(line))

    def test_standard_error_that_leads_to_the_journal_gets_priorities(self):
        """As systemd starts a service: $JOURNAL_STREAM names the device and inode of standard error."""
        reading, writing = os.pipe()
        info = os.fstat(writing)
        program = subprocess.Popen([DROPKVD, "--http", "127.0.0.1:0", "--socket", "off"], stderr=writing,
                                   env={**os.environ, "JOURNAL_STREAM": "%d:%d" % (info.st_dev, info.st_ino)})
        os.close(writing)
        with os.fdopen(reading, encoding="ascii") as lines:
            for line in lines:
                self.assertRegex(line, r"^<[0-7]>\S")
                if "listening on" in line:
                    break
            program.send_signal(signal.SIGTERM)
            lines.read()
        self.assertEqual(program.wait(60), 0)


class Journal(Folder):
    def test_fields_reach_the_journals_socket(self):
        """Its native protocol: one datagram an event, NAME=value lines."""
        journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(journal.close)
        journal.bind(self.path("journal"))
        journal.settimeout(60)
        received = []

        def read():
            while True:
                event = dict(line.split("=", 1) for line in journal.recv(65536).decode("ascii").rstrip("\n").split("\n"))
                received.append(event)
                if event["MESSAGE"].startswith("stopped"):
                    return

        reader = threading.Thread(target=read)
        reader.start()
        port_file = self.path("port")
        program = subprocess.Popen([DROPKVD, "--http", "127.0.0.1:0", "--socket", "off", "--log-format", "journald",
                                    "--log-file", self.path("journal"), "--log-level", "debug", "--port-file", port_file],
                                   stderr=subprocess.PIPE)
        while not os.path.exists(port_file):
            self.assertIsNone(program.poll())
        with open(port_file, encoding="ascii") as file:
            port = int(file.read())
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(named("chat-9", ["Connection: close"]))
            while connection.recv(65536):
                pass
        program.send_signal(signal.SIGTERM)
        self.assertEqual(program.wait(60), 0)
        reader.join(60)
        self.assertEqual(program.stderr.read(), b"")
        program.stderr.close()
        answered = next(e for e in received if e["MESSAGE"].startswith("answered request 1"))
        self.assertEqual((answered["PRIORITY"], answered["SYSLOG_IDENTIFIER"]), ("7", "dropkvd"))
        self.assertEqual((answered["DROPKV_STREAM"], answered["DROPKV_KEPT"]), ("chat-9", "16"))
        self.assertTrue(answered["DROPKV_TOTAL_US"].isdigit())
        started = next(e for e in received if e["MESSAGE"].startswith("listening on"))
        self.assertEqual(started["PRIORITY"], "6")

    def test_a_name_that_is_too_long_is_refused_before_the_start(self):
        for option in ("--log-file", "--trace-file"):
            result = subprocess.run([DROPKVD, "--check-config", option, "/tmp/" + "x" * 300],
                                    capture_output=True, text=True, timeout=60)
            self.assertEqual(result.returncode, 78)
            self.assertIn("_file: 305 characters, at most 255 are allowed", result.stderr)

    def test_a_journal_that_is_not_there_is_said_at_start(self):
        result = subprocess.run([DROPKVD, "--log-format", "journald", "--log-file", self.path("none")],
                                capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 69)
        self.assertIn("no journal takes messages", result.stderr)


class Hangup(Folder):
    """SIGHUP: files, tokens and limits."""

    def start(self, *options):
        """A daemon that logs to a file; its port comes from another."""
        daemon = FileDaemon(self, *options)
        self.addCleanup(daemon.stop)
        return daemon

    def test_the_log_goes_on_in_a_new_file_also_the_workers(self):
        daemon = self.start("--test-hooks")
        os.rename(self.path("log"), self.path("log.1"))
        daemon.hangup()
        daemon.wait_for_reload("ok", 1)
        old, new = self.lines("log.1"), self.lines("log")
        self.assertTrue(any("listening on" in line for line in old))
        self.assertTrue(any("SIGHUP: 0 fields" in line for line in new), new)
        deadline = time.monotonic() + 60
        while self.path("log.1") in daemon.worker_files():
            self.assertLess(time.monotonic(), deadline, "the worker keeps the old file")
        self.assertIn(self.path("log"), daemon.worker_files())

    def test_a_file_that_cannot_be_made_leaves_the_old_one(self):
        os.mkdir(self.path("logs"))
        daemon = self.start("--log-file", self.path("logs/log"))
        os.rename(self.path("logs"), self.path("gone"))
        daemon.hangup()
        daemon.wait_for_reload("failed", 1)
        self.assertTrue(any("the old one stays" in line for line in self.lines("gone/log")))

    def test_limits_are_taken_from_the_file_again(self):
        config = self.write("config", json.dumps({"max_json_bytes": 4096, "trace_every": 0}))
        daemon = self.start("--config", config)
        head, data = infer_body()
        padded = json.dumps({**json.loads(head), "id": "x" * 200}).encode()
        asked = lambda: daemon.ask(request("POST", INFER, (), padded + b" " * 3000 + data[:0])).status
        self.assertNotEqual(asked(), 413)
        self.write("config", json.dumps({"max_json_bytes": 1024, "trace_every": 0, "request_timeout_ms": 1000, "priorities": 2,
                                         "max_queue_requests": 7, "log_level": "debug"}))
        daemon.hangup()
        daemon.wait_for_reload("ok", 1)
        self.assertEqual(asked(), 413)
        self.assertEqual(daemon.metrics()["dropkv_queue_limit_requests"], 7)
        log = "\n".join(self.lines("log"))
        self.assertIn("SIGHUP: priorities has changed; that needs a restart", log)
        self.assertIn("SIGHUP: 4 fields of the configuration have changed", log)
        self.assertEqual(daemon.ask(infer_request()).status, 200)
        self.assertIn("answered request", self.lines("log")[-1])

    def test_a_bad_configuration_changes_nothing(self):
        config = self.write("config", json.dumps({"max_queue_requests": 7}))
        daemon = self.start("--config", config)
        for n, (text, said) in enumerate((
                ('{"max_queue_requests": 0}', "max_queue_requests: '0' is not a whole number in 1..1048576"),
                ('{"max_queue_requests": 8}', "max_queue_requests: 8 is above 7, what it was at start"),
                ('{"max_queue_requests": 3, "no_such": 1}', "there is no field 'no_such'"),
                ('{"max_queue_requests"', "line 1"))):
            self.write("config", text)
            daemon.hangup()
            daemon.wait_for_reload("failed", n + 1)
            self.assertIn(said, self.lines("log")[-1])
            self.assertIn("the configuration in force stays", self.lines("log")[-1])
            self.assertEqual(daemon.metrics()["dropkv_queue_limit_requests"], 7)
        self.write("config", '{"max_queue_requests": 3}')
        daemon.hangup()
        daemon.wait_for_reload("ok", 1)
        self.assertEqual(daemon.metrics()["dropkv_queue_limit_requests"], 3)

    def test_tokens_are_read_again(self):
        old, new = "o" * 40, "n" * 40
        self.write("tokens", old + "\n", 0o600)
        daemon = self.start("--token-file", self.path("tokens"))
        self.assertEqual(daemon.get("/v2", "Authorization: Bearer " + old).status, 200)
        self.write("tokens", new + "\n", 0o600)
        daemon.hangup()
        while daemon.get("/v2", "Authorization: Bearer " + new).status != 200:
            self.assertIsNone(daemon.process.poll())
        self.assertEqual(daemon.get("/v2", "Authorization: Bearer " + old).status, 401)


class Traces(Folder):
    def spans(self):
        found = []
        for line in self.lines("spans"):
            document = json.loads(line)
            (resource,) = document["resourceSpans"]
            attributes = {a["key"]: a["value"] for a in resource["resource"]["attributes"]}
            self.assertEqual(attributes["service.name"], {"stringValue": "dropkvd"})
            found.append(resource["scopeSpans"][0]["spans"])
        return found

    def test_a_sampled_request_is_written_as_otlp(self):
        with Daemon(DROPKVD, "--trace-file", self.path("spans"), "--trace-every", "0") as daemon:
            daemon.ask(named("chat", [traceparent()]))
            daemon.ask(named("chat", [traceparent(flags="00")]))
            daemon.ask(named("chat"))
            daemon.ask(named("chat", [traceparent()], timeout=1))
            self.assertEqual(daemon.metrics()["dropkv_spans_total"], 4 + 2)
        answered, late = self.spans()
        root, *children = answered
        self.assertEqual((root["traceId"], root["parentSpanId"], root["name"], root["kind"]),
                         (TRACE, PARENT, "dropkv.score", 2))
        self.assertEqual(root["status"], {"code": 1})
        attributes = {a["key"]: a["value"] for a in root["attributes"]}
        self.assertEqual(attributes["dropkv.stream"], {"stringValue": "chat"})
        self.assertEqual(attributes["dropkv.kept"], {"intValue": "16"})
        self.assertEqual([c["name"] for c in children], ["dropkv.receive", "dropkv.queue", "dropkv.device"])
        at = int(root["startTimeUnixNano"])
        for child in children:
            self.assertEqual((child["traceId"], child["parentSpanId"], child["kind"]), (TRACE, root["spanId"], 1))
            self.assertRegex(child["spanId"], "^[0-9a-f]{16}$")
            self.assertEqual(int(child["startTimeUnixNano"]), at)  # each begins where the one before ended
            at = int(child["endTimeUnixNano"])
        self.assertLessEqual(at, int(root["endTimeUnixNano"]))
        self.assertEqual(len({s["spanId"] for s in answered}), 4)
        self.assertEqual(late[0]["status"]["code"], 2)
        self.assertIn("deadline", late[0]["status"]["message"])

    def test_a_request_on_the_socket_says_it_in_a_parameter(self):
        value = traceparent().split(" ")[1]
        with SocketDaemon(DROPKVD, "--log-level", "debug", "--trace-file", self.path("spans"), "--trace-every", "0") as daemon, \
                Client(daemon.path) as client:
            data = infer_body(tokens=16)[1]
            views = [wire.view(0, 0, 32, 8 * 32), wire.view(0, 512, 32, 512), wire.view(0, 1024, 32, 512)]
            params = wire.real(wire.KEEP_RATIO, 0.25) + wire.text(wire.TRACEPARENT, value)
            client.ask(wire.SCORE_BLOCKS, wire.score_blocks([wire.block(views, tokens=16)], params), data).keep()
            daemon.wait_for_log("answered request 1.*traceparent " + value)
            other = value.replace(PARENT, "1" * 16)
            daemon.ask(named("chat", ["traceparent: " + other], traceparent=value))  # the header wins
            daemon.ask(named("chat", traceparent="no-trace"))
        self.assertEqual([spans[0]["parentSpanId"] for spans in self.spans()], [PARENT, "1" * 16])

    def test_one_of_so_many_untraced_requests_is_written(self):
        with Daemon(DROPKVD, "--trace-file", self.path("spans"), "--trace-every", "3") as daemon:
            for _ in range(7):
                daemon.ask(infer_request())
        found = self.spans()
        self.assertEqual(len(found), 3)
        self.assertEqual(len({s[0]["traceId"] for s in found}), 3)
        self.assertNotIn("parentSpanId", found[0][0])

    def test_headers_that_are_no_traceparent_are_not_carried(self):
        bad = ("00-%s-%s" % (TRACE, PARENT), "00-%s-%s-01-x" % (TRACE, PARENT), "ff-%s-%s-01" % (TRACE, PARENT),
               "00-%s-%s-01" % ("0" * 32, PARENT), "00-%s-%s-01" % (TRACE, "0" * 16), "00-%s-%s-0g" % (TRACE, PARENT),
               "00-%s-%s-01" % (TRACE.upper(), PARENT), "", "00-" + "a" * 5000)
        with Daemon(DROPKVD, "--log-level", "debug") as daemon:
            for value in bad:
                self.assertEqual(daemon.ask(named("x", ["traceparent: " + value])).status, 200)
            self.assertEqual(daemon.ask(named("x", ["traceparent: cc-%s-%s-01-later" % (TRACE, PARENT)])).status, 200)
            line = daemon.wait_for_log("answered request %d" % (len(bad) + 1)).string
            self.assertFalse([x for x in daemon.log if "traceparent" in x and x != line])
        self.assertIn("traceparent cc-%s-%s-01," % (TRACE, PARENT), line)


class FileDaemon(Daemon):
    """One whose log goes to a file, so that its port is told by another."""

    def __init__(self, test, *options):
        self.log_path = test.path("log")
        port_file = test.path("port")
        self.process = subprocess.Popen([DROPKVD, "--http", "127.0.0.1:0", "--socket", "off", "--log-file", self.log_path,
                                         "--port-file", port_file, *options])
        self.log = []
        while not os.path.exists(port_file):
            if self.process.poll() is not None:
                raise AssertionError("the daemon ended")
        with open(port_file, encoding="ascii") as file:
            self.port = int(file.read())

    def hangup(self):
        self.process.send_signal(signal.SIGHUP)

    def wait_for_reload(self, result, n):
        self.wait_for_metric('dropkv_config_reloads_total{result="%s"}' % result, lambda v: v == n)

    def worker_files(self):
        pid = self.process.pid
        with open("/proc/%d/task/%d/children" % (pid, pid), encoding="ascii") as file:
            folder = "/proc/%s/fd/" % file.read().split()[0]
        return {os.readlink(folder + fd) for fd in os.listdir(folder) if os.path.lexists(folder + fd)}

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(60) != 0:
            raise AssertionError("exit status %s" % self.process.returncode)


if __name__ == "__main__":
    unittest.main(verbosity=1)
