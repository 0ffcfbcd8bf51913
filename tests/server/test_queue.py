"""Who is served when there is more work than a device can do.

usage: test_queue.py DROPKVD
"""
import os
import sys
import tempfile
import threading
import unittest

from daemon import Daemon, infer_request, keep_indices, read_reply

DROPKVD = sys.argv.pop(1)
SLOW_ENGINE = ("--threads", "1", "--cpu-mask", "0")
OCCUPANT = {"tokens": 16384, "q_heads": 8, "kv_heads": 1, "dim": 128, "rows": 64,
            "parameters": {"window": 64, "keep_tokens": 64}}


class Busy:
    """A daemon with its engine busy, and the connections that wait behind."""

    def __init__(self, *options, fields=()):
        self.daemon = Daemon(DROPKVD, *SLOW_ENGINE, *options)
        self.fields = fields
        self.occupant = self.daemon.connect()
        self.occupant.sendall(infer_request(fields, **OCCUPANT))
        self.wait_for("dropkv_running_requests", 1)
        self.waiting = []

    def metric(self, name):
        text = self.daemon.get("/metrics", *self.fields).body.decode()
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + " "))

    def wait_for(self, name, value):
        while self.metric(name) != value:
            pass

    def add(self, fields=None, **shape):
        connection = self.daemon.connect()
        connection.sendall(infer_request(self.fields if fields is None else fields, **shape))
        self.waiting.append(connection)
        self.wait_for("dropkv_queue_depth", len(self.waiting))
        return connection

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for connection in (self.occupant, *self.waiting):
            connection.close()
        self.daemon.__exit__(*exc)


def order_of_answers(connections):
    """Names in the order in which their replies come."""
    order, lock = [], threading.Lock()

    def read(name, connection):
        assert read_reply(connection).status == 200
        with lock:
            order.append(name)

    threads = [threading.Thread(target=read, args=item) for item in connections.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return order


class Queue(unittest.TestCase):
    def test_a_higher_priority_overtakes(self):
        shape = {"tokens": 8192, "q_heads": 8, "dim": 64, "rows": 64}
        with Busy("--max-batch-items", "1") as busy:
            waiting = {}
            for name, priority in (("low", 4), ("default", 0), ("none such", 99), ("high", 1)):
                waiting[name] = busy.add(**shape, parameters={"window": 64, "priority": priority})
            for priority, depth in ((1, 1), (2, 2), (3, 0), (4, 1)):
                self.assertEqual(busy.metric('dropkv_queue_waiting{priority="%d"}' % priority), depth)
            self.assertGreater(busy.metric('dropkv_queue_age_seconds{priority="4"}'), 0)
            self.assertEqual(order_of_answers(waiting), ["high", "default", "none such", "low"])

    def test_a_token_has_a_quota_over_all_its_connections(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tokens")
            with open(path, "w", encoding="ascii") as file:
                file.write("greedy %s\npolite %s\n" % ("g" * 40, "p" * 40))
            os.chmod(path, 0o600)
            greedy, polite = ["Authorization: Bearer " + "g" * 40], ["Authorization: Bearer " + "p" * 40]
            with Busy("--token-file", path, "--max-client-requests", "3", fields=greedy) as busy:
                busy.add()
                busy.add()
                reply = busy.daemon.ask(infer_request(greedy))
                self.assertEqual(reply.status, 429, reply.body)
                self.assertGreaterEqual(int(reply.fields["retry-after"]), 1)
                self.assertIn("quota", reply.error())
                busy.add(polite)
                self.assertEqual(busy.metric('dropkv_admission_total{verdict="quota"}'), 1)
                for connection in (busy.occupant, *busy.waiting):
                    self.assertEqual(read_reply(connection).status, 200)
                self.assertEqual(busy.daemon.ask(infer_request(greedy)).status, 200)

    def test_who_asks_for_it_gets_an_answer_by_recency(self):
        parameters = {"keep_tokens": 16, "sinks": 4, "on_overload": "recency"}
        with Busy("--max-queue-read-bytes", "20MiB", "--max-client-read-bytes", "20MiB") as busy:
            shape = {"tokens": 1 << 14, "dim": 64}
            refused = busy.daemon.ask(infer_request(**shape, parameters={"keep_tokens": 16}))
            self.assertEqual(refused.status, 503, refused.body)
            reply = busy.daemon.ask(infer_request(**shape, parameters=parameters, binary_output=False))
            self.assertEqual(reply.status, 200, reply.body)
            self.assertTrue(reply.json()["parameters"]["degraded"])
            tokens = shape["tokens"]
            self.assertEqual(keep_indices(reply), [0, 1, 2, 3, *range(tokens - 12, tokens)])
            with_scores = busy.daemon.ask(infer_request(**shape, parameters=parameters,
                                                        output_names=("keep_indices", "scores")))
            self.assertEqual(with_scores.status, 503, "scores cannot be made up")
            self.assertEqual(busy.metric("dropkv_degraded_total"), 1)
            self.assertEqual(read_reply(busy.occupant).status, 200)
            calm = busy.daemon.ask(infer_request(parameters=parameters, binary_output=False))
            self.assertFalse(calm.json()["parameters"]["degraded"])


if __name__ == "__main__":
    unittest.main(verbosity=1)
