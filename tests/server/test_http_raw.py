"""Requests that no HTTP library would send, against a real daemon.

usage: test_http_raw.py DROPKVD
"""
import json
import re
import socket
import sys
import time
import unittest

from daemon import INFER, Daemon, infer_body, is_closed, read_reply, read_to_end, request

DROPKVD = sys.argv.pop(1)
CANARY = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = "POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\n"


def n_replies(data):
    return len(re.findall(rb"HTTP/1\.[01] \d\d\d ", data))


# name: (raw request with a second one smuggled in it, statuses that are right)
DESYNC = {
    "content_length_and_chunked": (POST + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400,)),
    "chunked_and_content_length": (POST + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", (400,)),
    "two_content_lengths": (POST + "Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(CANARY), (400,)),
    "the_same_content_length_twice": (POST + "Content-Length: 0\r\nContent-Length: 0\r\n\r\n", (400,)),
    "chunked_twice": (POST + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400,)),
    "chunked_then_identity": (POST + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", (400,)),
    "transfer_encoding_on_1_0": (
        POST.replace("1.1", "1.0") + "Transfer-Encoding: chunked\r\nConnection: keep-alive\r\n\r\n0\r\n\r\n", (400,)),
    "space_before_colon": (POST + "Content-Length : %d\r\n\r\n" % len(CANARY), (400, 411)),
    "tab_before_colon": (POST + "Content-Length\t: %d\r\n\r\n" % len(CANARY), (400, 411)),
    "gzip_chunked": (POST + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", (400,)),
    "xchunked": (POST + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", (400,)),
    "identity": (POST + "Transfer-Encoding: identity\r\n\r\n", (400,)),
    "length_2_64_minus_1": (POST + "Content-Length: 18446744073709551615\r\n\r\n", (400, 413)),
    "length_2_64": (POST + "Content-Length: 18446744073709551616\r\n\r\n", (400, 413)),
    "length_2_63": (POST + "Content-Length: 9223372036854775808\r\n\r\n", (400, 413)),
    "length_with_plus": (POST + "Content-Length: +5\r\n\r\n", (400,)),
    "length_with_minus": (POST + "Content-Length: -1\r\n\r\n", (400,)),
    "length_as_list": (POST + "Content-Length: 5,5\r\n\r\n", (400,)),
    "length_with_space": (POST + "Content-Length: 5 5\r\n\r\n", (400,)),
    "length_in_hexadecimal": (POST + "Content-Length: 0x5\r\n\r\n", (400,)),
    "length_empty": (POST + "Content-Length:\r\n\r\n", (400, 411)),
    "chunk_size_above_64_bits": (
        POST + "Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n", (400, 413)),
    "post_without_length": (POST + "\r\n", (411,)),
    "get_with_body": (
        "GET /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(CANARY), (400,)),
    "bare_lf_in_request_line": ("GET /v2 HTTP/1.1\nHost: localhost\r\n\r\n", (400,)),
    "bare_lf_in_header": ("GET /v2 HTTP/1.1\r\nX: a\nHost: localhost\r\n\r\n", (400,)),
    "bare_lf_hides_a_length": (POST + "X: a\nContent-Length: 0\r\n\r\n", (400,)),
    "bare_lf_at_the_end": ("GET /v2 HTTP/1.1\r\nHost: localhost\n\n", (400,)),
    "bare_lf_empty_line": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\n\n", (400,)),
    "bare_lf_before_empty_line": ("GET /v2 HTTP/1.1\r\nHost: localhost\n\r\n", (400,)),
    "nul_in_value": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n", (400,)),
    "nul_in_name": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nX\0Y: b\r\n\r\n", (400,)),
    "control_character_in_value": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: a\x01b\r\n\r\n", (400,)),
    "folded_line": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n", (400,)),
    "no_host": ("GET /v2 HTTP/1.1\r\n\r\n", (400,)),
    "two_hosts": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", (400,)),
    "no_colon": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nhello\r\n\r\n", (400,)),
    "no_name": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\n: x\r\n\r\n", (400,)),
    "compressed": (POST + "Content-Encoding: gzip\r\nContent-Length: 0\r\n\r\n", (415,)),
    "foreign_host": ("GET /v2 HTTP/1.1\r\nHost: evil.example\r\n\r\n", (403,)),
    "foreign_host_like_ours": ("GET /v2 HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", (403,)),
    "foreign_origin": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", (403,)),
    "null_origin": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\n\r\n", (403,)),
    "two_spaces_in_request_line": ("GET /v2  HTTP/1.1\r\nHost: localhost\r\n\r\n", (400,)),
    "no_version": ("GET /v2\r\nHost: localhost\r\n\r\n", (400,)),
    "version_2": ("GET /v2 HTTP/2.0\r\nHost: localhost\r\n\r\n", (400, 505)),
    "65_fields": (
        "GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + "".join("X%d: 1\r\n" % i for i in range(64)) + "\r\n", (431,)),
    "17_kb_of_fields": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + "a" * 17000 + "\r\n\r\n", (431,)),
    "200_kb_of_fields": ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + "a" * 200000 + "\r\n\r\n", (431, 413)),
}

# Refused by libmicrohttpd itself, in its own words: always, and from 1.0 on.
LIBRARYS = {"chunk_size_above_64_bits"}
NEWER_LIBRARYS = {"content_length_and_chunked", "chunked_and_content_length", "space_before_colon", "tab_before_colon",
                  "gzip_chunked", "xchunked", "identity", "no_host"}


class Raw(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(DROPKVD, "--keepalive-timeout-ms", "3000")

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def send(self, raw):
        """Everything that comes back until the daemon closes."""
        with self.daemon.connect() as connection:
            try:
                connection.sendall(raw)
            except (BrokenPipeError, ConnectionResetError):
                pass
            return read_to_end(connection)

    def test_ambiguous_requests_are_refused_and_nothing_behind_them_is_executed(self):
        for name, (raw, statuses) in DESYNC.items():
            with self.subTest(name):
                data = self.send(raw.encode("latin-1") + CANARY)
                self.assertEqual(n_replies(data), 1, data)
                self.assertIn(int(data.split(b" ", 2)[1]), statuses, data)
                head, body = data.split(b"\r\n\r\n", 1)
                if name in LIBRARYS or (name in NEWER_LIBRARYS and body.startswith(b"<html>")):
                    continue
                self.assertIn(b"\r\nConnection: close", head)
                self.assertEqual(list(json.loads(body)), ["error"])
                self.assertLess(len(body), 1024)

    def test_so_are_ambiguous_requests_behind_a_good_one(self):
        for name, (raw, statuses) in DESYNC.items():
            with self.subTest(name), self.daemon.connect() as connection:
                connection.sendall(CANARY)
                self.assertEqual(read_reply(connection).status, 200)
                try:
                    connection.sendall(raw.encode("latin-1") + CANARY)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                data = read_to_end(connection)
                self.assertNotIn(b" 200 OK", data)
                if data:  # a reset may have overtaken it
                    self.assertIn(int(data.split(b" ", 2)[1]), statuses, data)

    def test_a_header_may_come_in_pieces(self):
        raw = request("POST", "/v2/repository/index", ["Connection: close"], b"{}")
        for size in (1, 7, 50):
            with self.subTest(size), self.daemon.connect() as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for at in range(0, len(raw), size):
                    connection.sendall(raw[at : at + size])
                self.assertEqual(read_reply(connection).status, 200)

    def test_peers_that_leave_in_the_middle_of_a_header_are_forgotten(self):
        fds = self.daemon.n_fds()
        for n in (0, 1, 20):
            for _ in range(50):
                with self.daemon.connect() as connection:
                    connection.sendall(CANARY[:n])
        self.daemon.wait_for_metric('dropkv_connections{transport="http"}', lambda v: v == 1)
        deadline = time.monotonic() + 20
        while self.daemon.n_fds() > fds:
            self.assertLess(time.monotonic(), deadline, "descriptors leak")

    def test_a_chunked_request_is_the_last_of_its_connection(self):
        rows = {
            "well_formed": b"0\r\n\r\n",
            "bare_lf_after_chunk_size": b"0\n\r\n",
            "bare_lf_all_over": b"1\nA\n0\n\n",
            "long_chunk_extension": b"1;" + b"x" * 20000 + b"\r\nA\r\n0\r\n\r\n",
            "trailer": b"0\r\nContent-Length: 5\r\n\r\n",
        }
        for name, body in rows.items():
            with self.subTest(name):
                data = self.send((POST + "Transfer-Encoding: chunked\r\n\r\n").encode() + body + CANARY)
                self.assertLessEqual(n_replies(data), 1, data)
                if "bare_lf" in name:  # libmicrohttpd before 1.0 takes it, later ones refuse
                    self.assertIn(data.split(b" ", 2)[1], (b"200", b"400"), data)
                if data:
                    self.assertIn(b"\r\nconnection: close", data.lower())

    def test_a_bare_line_feed_between_chunks_hides_no_request(self):
        """What one reader takes for the end of the body and another for more of it."""
        hidden = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for body in (b"0\n\n" + hidden, b"0\n\r\n" + hidden, b"0\r\n\n" + hidden, b"2;\nxx\r\n0\r\n\r\n" + hidden,
                     b"2\n{}\n0\r\n\r\n" + hidden, b"2;a\n{}\r\n0\n\n" + hidden):
            with self.subTest(body):
                before = self.daemon.metrics()['dropkv_http_responses_total{class="2xx"}']
                data = self.send((POST + "Transfer-Encoding: chunked\r\n\r\n").encode() + body)
                self.assertLessEqual(n_replies(data), 1, data)
                after = self.daemon.metrics()['dropkv_http_responses_total{class="2xx"}']
                self.assertLessEqual(after - before, 2, "the body's reply and that of asking, no more")

    def test_a_later_header_that_ends_in_bare_line_feeds_is_refused(self):
        """Also where nothing or zeros follow, as what the library leaves of a line's end."""
        length = POST.encode() + b"Content-Length: 4"
        for later in (CANARY[:-2] + b"\n", CANARY[:-4] + b"\n\n", CANARY[:-4] + b"\n\r\n", length + b"\n\n" + bytes(4),
                      length + b"\r\n\n" + bytes(4), b"GET /v2 HTTP/1.0\n\n", b"GET /v2 HTTP/1.0\r\n\n"):
            with self.subTest(later):
                data = self.send(CANARY + later)
                self.assertEqual(re.findall(rb"HTTP/1\.[01] (\d\d\d) ", data), [b"200", b"400"], data)

    def test_pipelined_requests_are_answered_in_order(self):
        data = self.send(CANARY * 3 + request("GET", "/v2/nothing", ["Connection: close"]))
        self.assertEqual(n_replies(data), 4, data)
        self.assertIn(b"404 Not Found", data[data.rindex(b"HTTP/1.1") :])

    def test_the_length_of_the_json_part_must_be_a_plain_number_within_the_body(self):
        head, data = infer_body()
        for value in ("", "abc", "-1", "+5", "0x10", "1e3", "99999999999999999999", " ", "5 5",
                      str(len(head) + len(data) + 1), "18446744073709551616"):
            with self.subTest(value):
                with self.daemon.connect() as connection:
                    connection.sendall(request("POST", INFER, ["Inference-Header-Content-Length: " + value], head + data))
                    reply = read_reply(connection)
                self.assertEqual(reply.status, 400)
                self.assertIn("Inference-Header-Content-Length", reply.error())
        with self.subTest("repeated"):
            field = "Inference-Header-Content-Length: %d" % len(head)
            self.assertEqual(self.daemon.ask(request("POST", INFER, [field, field], head + data)).status, 400)

    def test_paths_match_whole_and_undecoded(self):
        rows = {
            "/v2/": 404, "/v2//health/live": 404, "/v2/health/live/": 404, "/V2/health/live": 404,
            "/v2%2Fhealth%2Flive": 404, "/v2/health/live?x=/../..": 200, "/v2?x": 200, "/": 200, "/index.html": 404, "": 400,
            "/v2/models/dropkv%2Fready": 404, "/v2/models/dropkv%2freadyx/ready": 404,
            "/v2/models/%64ropkv/ready": 200, "/v2/models/dropkv/versions/1/ready": 200,
            "/v2/models/dropkv/versions/2/ready": 404, "/v2/models/dropkv/versions/one/ready": 404,
            "/v2/models/dropkv/versions//ready": 404, "/v2/models/other/ready": 404,
            "/v2/models/a%00b/ready": 404, "/v2/models/%zz/ready": 404, "/v2/models/%4/ready": 404,
            "/v2/models/" + "a" * 200 + "/ready": 404, "/v2/../v2/health/live": 404, "/v2/./health/live": 404,
            "/v2/systemsharedmemory/region/a%2Fb/status": 404, "/v2/cudasharedmemory/status": 200,
            "http://localhost/v2": 404, "*": 404,
        }
        for path, status in rows.items():
            with self.subTest(path):
                data = self.send(request("GET", path, ["Connection: close"]))
                self.assertEqual(int(data.split(b" ", 2)[1]), status, data)

    def test_another_method_is_405_and_says_which(self):
        for method, path, allow in (("DELETE", "/v2", "GET, HEAD"), ("GET", INFER, "POST"),
                                    ("PUT", "/metrics", "GET, HEAD")):
            with self.subTest(path):
                reply = self.daemon.ask(request(method, path, ["Content-Length: 0"]))
                self.assertEqual(reply.status, 405)
                self.assertEqual(reply.error(), "Method Not Allowed")
                self.assertEqual(reply.fields["allow"], allow)

    def test_head_is_answered_without_a_body(self):
        data = self.send(request("HEAD", "/v2", ["Connection: close"]))
        self.assertTrue(data.startswith(b"HTTP/1.1 200 "))
        self.assertTrue(data.endswith(b"\r\n\r\n"), data)

    def test_three_gib_are_refused_by_length_alone(self):
        before = self.daemon.rss_kib()
        with self.daemon.connect() as connection:
            connection.sendall(request("POST", INFER, ["Inference-Header-Content-Length: 187",
                                                       "Content-Length: %d" % (100 << 30)]))
            reply = read_reply(connection)
            self.assertEqual(reply.status, 413)
            self.assertTrue(is_closed(connection, 10))
        with self.daemon.connect() as connection:  # below the limit: begun, then given up by us
            connection.sendall(request("POST", INFER, ["Inference-Header-Content-Length: 187",
                                                       "Content-Length: %d" % (3 << 30), "Expect: 100-continue"]))
            self.assertEqual(read_reply(connection).status, 100)
        self.daemon.wait_for_metric("dropkv_body_bytes", lambda v: v == 0)
        self.assertLess(self.daemon.rss_kib() - before, 8 << 10)

    def test_a_million_chunks_of_one_byte_are_bounded(self):
        piece = b"1\r\nA\r\n" * 10000
        before = self.daemon.rss_kib("VmHWM")
        with self.daemon.connect() as connection:
            connection.sendall(request("POST", INFER, ["Transfer-Encoding: chunked"]))
            for _ in range(100):
                connection.sendall(piece)
            connection.sendall(b"0\r\n\r\n")
            reply = read_reply(connection)
        self.assertEqual(reply.status, 400)
        self.assertLess(self.daemon.rss_kib("VmHWM") - before, 8 << 10)

    def test_a_chunked_body_above_its_limit_is_refused_while_it_comes(self):
        data = b""
        with self.daemon.connect() as connection:
            connection.sendall(request("POST", INFER, ["Transfer-Encoding: chunked"]))
            piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
            try:
                for _ in range(64):
                    connection.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                pass
            data = read_to_end(connection)
        self.assertTrue(data == b"" or data.startswith(b"HTTP/1.1 413 "), data)
        self.daemon.wait_for_metric("dropkv_body_bytes", lambda v: v == 0)

    def test_a_refused_upload_hears_why(self):
        head = b"{" + b" " * 100
        with self.daemon.connect() as connection:
            connection.sendall(request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(head),
                                                       "Content-Length: %d" % (64 << 20)], head))
            try:
                for _ in range(64):
                    connection.sendall(b"\0" * (1 << 20))
            except (BrokenPipeError, ConnectionResetError):
                pass
            data = read_to_end(connection)
        self.assertTrue(data.startswith(b"HTTP/1.1 400 "), data)


if __name__ == "__main__":
    unittest.main(verbosity=1)
