"""The status page of a real daemon in a real browser (Debian: chromium), headless.

usage: test_page.py DROPKVD

What it shows is what /metrics and the statistics say, it asks nobody else, nothing reaches the console,
and it can be read: by keyboard, by what assistive technology is told, in both themes, from 360 to 2,560
pixels. DROPKVD_SHOTS=FOLDER keeps pictures.
"""
import base64
import hashlib
import os
import re
import signal
import struct
import sys
import tempfile
import unittest

import browser
import wire
from daemon import INFER, Daemon, infer_body, infer_request, keep_indices, request
from socket_daemon import SocketDaemon
from wire import Client, Memory

DROPKVD = sys.argv.pop(1)
WIDTHS = (360, 768, 1280, 2560)
SCHEMES = ("light", "dark")
READINGS = "Number(document.documentElement.dataset.readings)"

# Text and what is behind it, composed as the screen does; the least ratio, and where.
CONTRAST = """(() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3])).concat(1);
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.unshift(parse(getComputedStyle(e).backgroundColor));
    return layers.reduce((under, layer) => over(layer, under), [255, 255, 255, 1]);
  };
  const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  let worst = { ratio: 99, text: "none" };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName)) continue;
    if (element.closest(".hidden, .skip") || !element.getClientRects().length) continue;
    const ground = behind(element);
    const a = light(over(parse(getComputedStyle(element).color), ground));
    const b = light(ground);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst.ratio) worst = { ratio, text: walker.currentNode.textContent };
  }
  return worst;
})()"""

FIGURES = """[...document.querySelectorAll("[data-series]")].map((e) => [e.dataset.series, Number(e.dataset.value), e.textContent])"""

# These move by being looked at.
RESTLESS = ("process_", "dropkv_worker_resident_memory_bytes", "dropkv_connections{", "dropkv_clients", "dropkv_http_responses")


def named(stream, fields=(), **shape):
    parameters = {"keep_ratio": 0.25, "stream": stream, **shape.pop("parameters", {})}
    head, data = infer_body(parameters=parameters, **shape)
    return request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(head), *fields], head + data)


def nan_request():
    head, data = infer_body()
    data = data[:-4] + struct.pack("<f", float("nan"))
    return request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(head)], head + data)


class Served(unittest.TestCase):
    """Without a browser."""

    def test_the_page_is_one_file_under_a_strict_policy(self):
        with Daemon(DROPKVD) as daemon:
            reply = daemon.get("/")
            self.assertEqual(daemon.ask(request("POST", "/")).status, 405)
        text = reply.body.decode()
        self.assertEqual((reply.status, reply.fields["content-type"]), (200, "text/html; charset=utf-8"))
        self.assertEqual(reply.fields["x-content-type-options"], "nosniff")
        policy = dict(part.strip().split(" ", 1) for part in reply.fields["content-security-policy"].split(";"))
        self.assertEqual(policy["default-src"], "'none'")
        self.assertEqual((policy["connect-src"], policy["frame-ancestors"]), ("'self'", "'none'"))
        for name in ("script", "style"):
            (inside,) = re.findall("<%s>(.*?)</%s>" % (name, name), text, re.S)
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            self.assertEqual(policy[name + "-src"], "'sha256-%s'" % digest)
        self.assertNotIn("unsafe", reply.fields["content-security-policy"])
        self.assertEqual(re.findall(r"""(?:src|href)=["'](?!#|data:|metrics|v2/)[^"']*""", text), [])
        self.assertEqual(set(re.findall(r"https?://[^\s'\"<)]*", text)), {"http://www.w3.org/2000/svg"})

    def test_statistics_are_complete_and_bounded(self):
        with Daemon(DROPKVD, "--max-streams", "80") as daemon:
            for i in range(100):
                self.assertEqual(daemon.ask(named("s%d" % i, tokens=16)).status, 200)
            (model,) = daemon.get("/v2/models/dropkv/stats").json()["model_stats"]
            metrics = daemon.metrics()
        ours = model["dropkv"]
        (device,) = ours["devices"]
        self.assertEqual((device["device"], device["up"], device["blocks"]), ("cpu", True, 100))
        self.assertAlmostEqual(device["busy_s"], metrics['dropkv_worker_busy_seconds_total{worker="0",device="cpu"}'])
        streams = ours["streams"]
        self.assertEqual((streams["known"], streams["limit"], streams["forgotten"]), (80, 80, 20))
        self.assertEqual((metrics["dropkv_streams"], metrics["dropkv_streams_evicted_total"]), (80, 20))
        self.assertEqual(len(streams["heaviest"]), 64)
        self.assertTrue(0.7 < sum(s["share"] for s in streams["heaviest"]) <= 1.0001)
        self.assertEqual([len(ours["queue"]["levels"]), ours["queue"]["limit"]], [4, 256])
        self.assertEqual(sum(b["compute_infer"]["count"] for b in model["batch_stats"]), model["execution_count"])
        self.assertEqual(sum(b["batch_size"] * b["compute_infer"]["count"] for b in model["batch_stats"]), 100)
        self.assertGreater(model["batch_stats"][0]["compute_infer"]["ns"], 0)
        (memory,) = model["memory_usage"]
        self.assertEqual((memory["type"], memory["id"]), ("CPU", 0))
        self.assertEqual(memory["byte_size"], metrics["dropkv_scratch_bytes"])

    def test_positions_are_told_only_where_that_was_asked_for(self):
        raw = named("chat", tokens=128)
        for options in ((), ("--show-keep-sets",)):
            with Daemon(DROPKVD, *options) as daemon:
                kept = keep_indices(daemon.ask(raw))
                text = daemon.get("/v2/models/dropkv/stats").body.decode()
                (stream,) = daemon.get("/v2/models/dropkv/stats").json()["model_stats"][0]["dropkv"]["streams"]["heaviest"]
                if not options:
                    self.assertNotIn("keep_set\"", text.replace('"keep_sets"', ""))
                    continue
                counted = [0] * 64
                for index in kept:
                    counted[index // 2] += 1
                self.assertEqual(stream["keep_set"], [50 * n for n in counted])

    def test_an_answer_in_the_callers_memory_has_its_positions_too(self):
        data = infer_body(tokens=96)[1]
        views = [wire.view(1, 0, 32, 8 * 32), wire.view(1, 512, 32, 96 * 32), wire.view(1, 512 + 96 * 32, 32, 96 * 32)]
        with SocketDaemon(DROPKVD, "--show-keep-sets") as daemon, Client(daemon.path) as client, \
                Memory(len(data)) as memory, Memory(4096) as place:
            memory.map[:] = data
            client.add_memfd(memory.fd, len(data))
            output = client.add_memfd(place.fd, 4096, writable=1)
            message = wire.score_blocks([wire.block(views, tokens=96)], wire.real(wire.KEEP_RATIO, 0.25), output=(output, 0, 4096))
            (kept,) = client.ask(wire.SCORE_BLOCKS, message).keep(place.map[:4096])
            (stream,) = daemon.get("/v2/models/dropkv/stats").json()["model_stats"][0]["dropkv"]["streams"]["heaviest"]
            self.assertEqual(len(kept), 24)
            parts = [range(part * 96 // 64, (part + 1) * 96 // 64) for part in range(64)]
            self.assertEqual(stream["keep_set"],
                             [100 * len(set(part) & set(kept)) // len(part) for part in parts])

    def test_a_token_is_needed_and_a_browser_can_send_one(self):
        """As a password under any name, where nothing but looking is possible; elsewhere only as a bearer."""
        token = "t" * 43
        basic = "Authorization: Basic " + base64.b64encode(("anna:" + token).encode()).decode()
        wrong = "Authorization: Basic " + base64.b64encode(("anna:" + token[:-1]).encode()).decode()
        pages = ("/", "/metrics", "/v2/models/dropkv/stats")
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(token + "\n")
            file.flush()
            with Daemon(DROPKVD, "--token-file", file.name) as daemon:
                for path in pages:
                    for fields in ((), (wrong,), ("Authorization: Basic !!!",), ("Authorization: Basic",)):
                        reply = daemon.get(path, *fields)
                        self.assertEqual(reply.status, 401, (path, fields))
                        self.assertTrue(reply.fields["www-authenticate"].startswith("Basic" if path == "/" else "Bearer"))
                    self.assertEqual(daemon.get(path, basic).status, 200, path)
                    self.assertEqual(daemon.get(path, "Authorization: Bearer " + token).status, 200, path)
                for path in ("/v2", "/v2/models/dropkv", "/v2/models/stats"):
                    self.assertEqual(daemon.get(path, basic).status, 401, path)
                self.assertEqual(daemon.ask(infer_request([basic])).status, 401)
                self.assertNotIn(token, "\n".join(daemon.log))


@unittest.skipUnless(browser.program(), "chromium is not installed")
class InABrowser(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = browser.Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.__exit__(None, None, None)

    def open(self, daemon, width=1280, height=800, scheme="light"):
        page = self.browser.page(width, height, scheme)
        page.go("http://127.0.0.1:%d/" % daemon.port)
        page.wait(READINGS + " >= 1")
        return page

    def next_reading(self, page):
        """A reading that began after now. The page asks at once when it comes into view; of two, the second cannot
        have been under way already."""
        for _ in range(2):
            seen = page.evaluate(READINGS)
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            page.wait("%s > %d" % (READINGS, seen))

    def work(self, daemon):
        """Something of everything that the page shows."""
        data = infer_body(tokens=96)[1]
        views = [wire.view(1, 0, 32, 8 * 32), wire.view(1, 512, 32, 96 * 32), wire.view(1, 512 + 96 * 32, 32, 96 * 32)]
        for name in ("chat-1", "chat-2", "agents.code-review"):
            for tokens in (64, 512, 4096):
                self.assertEqual(daemon.ask(named(name, tokens=tokens)).status, 200)
        with Client(daemon.path) as client, Memory(len(data)) as memory:
            memory.map[:] = data
            client.add_memfd(memory.fd, len(data))
            params = wire.real(wire.KEEP_RATIO, 0.25) + wire.text(wire.STREAM, "shared")
            client.ask(wire.SCORE_BLOCKS, wire.score_blocks([wire.block(views, tokens=96)], params)).keep()
        self.assertEqual(daemon.ask(named("late", parameters={"timeout": 1})).status, 503)
        self.assertEqual(daemon.ask(named("wrong", parameters={"window": 0})).status, 400)
        self.assertEqual(daemon.ask(nan_request()).status, 400)
        daemon.wait_for_metric('dropkv_regions{kind="sealed"}', lambda v: v == 0)

    def test_its_numbers_are_those_of_the_metrics(self):
        with SocketDaemon(DROPKVD, "--show-keep-sets") as daemon:
            page = self.open(daemon)
            self.work(daemon)
            self.next_reading(page)
            shown = page.evaluate(FIGURES)
            metrics = daemon.metrics()
            compared = [figure for figure in shown if not figure[0].startswith(RESTLESS)]
            self.assertGreaterEqual(len(compared), 35)
            for series, value, text in compared:
                self.assertEqual(value, metrics[series], series)
                if "bytes" not in series:
                    self.assertEqual(text, "{:,}".format(int(value)), series)
            said = {series for series, value, _ in compared if value > 0}
            for series in ('dropkv_requests_total{outcome="ok"}', 'dropkv_requests_total{outcome="timeout"}',
                           'dropkv_nonfinite_inputs_total{action="refused"}', 'dropkv_bytes_in_total{transport="shared"}',
                           'dropkv_regions_released_total{reason="disconnect"}'):
                self.assertIn(series, said)
            # The histogram, bucket by bucket, as its table has it.
            page.evaluate("document.querySelector('input[value=all]').click()")
            counts = page.evaluate("[...document.querySelectorAll('#latency-table tbody tr')].map((row) => "
                                   "[...row.cells].slice(1).map((cell) => Number(cell.textContent)))")
            for column, family in enumerate(("request", "queue", "compute")):
                name = "dropkv_%s_seconds" % family
                below, expected = 0, []
                for series, value in metrics.items():
                    if series.startswith(name + "_bucket"):
                        expected.append(value - below)
                        below = value
                self.assertEqual([row[column] for row in counts], expected, name)
                self.assertEqual(sum(expected), metrics[name + "_count"])
            # Streams as the statistics have them.
            rows = page.evaluate("[...document.querySelectorAll('#streams tbody tr')].map((row) => "
                                 "[...row.cells].map((cell) => cell.textContent))")
            stats = daemon.get("/v2/models/dropkv/stats").json()["model_stats"][0]["dropkv"]["streams"]["heaviest"]
            self.assertEqual([row[0] for row in rows], [s["stream"] or "(no name)" for s in stats])
            self.assertEqual([row[2] for row in rows], ["{:,}".format(s["answered"]) for s in stats])
            self.assertEqual([row[4] for row in rows], ["{:,}".format(s["tokens_in"]) for s in stats])
            strips = page.evaluate("document.querySelectorAll('.strip:not(.none)').length")
            self.assertEqual(strips, sum("keep_set" in s for s in stats))
            self.assertIn("deadline", page.evaluate("document.getElementById('reasons').textContent"))
            self.assertEqual(page.evaluate("document.getElementById('verdict').dataset.state"), "warn")
            self.assertEqual(page.complaints, [])

    def test_it_fits_and_can_be_read_at_every_width_in_both_themes(self):
        shots = os.environ.get("DROPKVD_SHOTS")
        with SocketDaemon(DROPKVD, "--show-keep-sets") as daemon:
            page = self.open(daemon)
            for state in ("calm", "busy"):
                if state == "busy":
                    self.work(daemon)
                    self.next_reading(page)
                for width in WIDTHS:
                    for scheme in SCHEMES:
                        page.resize(width, 800)
                        page.scheme(scheme)
                        page.wait("innerWidth === %d && matchMedia('(prefers-color-scheme: %s)').matches" % (width, scheme))
                        self.assertLessEqual(page.evaluate("document.documentElement.scrollWidth"), width)
                        worst = page.evaluate(CONTRAST)
                        self.assertGreaterEqual(worst["ratio"], 4.5, (state, width, scheme, worst["text"]))
                        if shots:
                            page.shoot(os.path.join(shots, "%s-%d-%s.png" % (state, width, scheme)))
            self.assertEqual(page.complaints, [])
            origin = "http://127.0.0.1:%d/" % daemon.port
            self.assertEqual({url for url in page.requests if not url.startswith("data:")},
                             {origin, origin + "metrics", origin + "v2/models/dropkv/stats"})

    def test_it_can_be_used_by_keyboard_and_is_told_to_assistive_technology(self):
        with SocketDaemon(DROPKVD, "--show-keep-sets") as daemon:
            page = self.open(daemon)
            self.work(daemon)
            self.next_reading(page)
            seen = []
            for _ in range(20):
                page.press("Tab")
                if page.evaluate("document.activeElement === document.body"):
                    break  # round once
                seen.append(page.evaluate("(document.activeElement.id || document.activeElement.textContent || "
                                          "document.activeElement.getAttribute('value')).trim()"))
                self.assertTrue(page.evaluate("document.activeElement.matches(':focus-visible')"))
            self.assertEqual(seen[:2], ["Skip to the figures", "pause"])
            for name in ("As a table", "/metrics", "/v2/models/dropkv/stats"):
                self.assertIn(name, seen)
            nodes = self.browser.call("Accessibility.getFullAXTree", {}, page.session)["nodes"]
            told = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
            for role, name in told:
                if role in ("button", "radio", "image", "img", "link", "heading", "table", "region", "figure"):
                    self.assertTrue(name or role in ("table", "figure"), (role, name))
            headings = [name for role, name in told if role == "heading"]
            for name in ("Latency", "Queue", "Devices and workers", "Streams"):
                self.assertIn(name, headings)
            self.assertEqual(page.evaluate("document.querySelectorAll('h1').length"), 1)
            self.assertIn("status", [role for role, _ in told])
            self.assertTrue([name for role, name in told if role in ("image", "img") and "kept of the first tenth" in name])
            # The table stays one where it is laid out as cards.
            page.resize(360, 800)
            nodes = self.browser.call("Accessibility.getFullAXTree", {}, page.session)["nodes"]
            self.assertGreater(sum(n["role"]["value"] == "rowheader" for n in nodes if not n["ignored"]), 15)
            # Pause: nothing is asked any more until it goes on.
            page.evaluate("document.getElementById('pause').focus()")
            page.press("Enter")
            self.assertEqual(page.evaluate("document.getElementById('pause').getAttribute('aria-pressed')"), "true")
            page.wait("performance.getEntriesByType('resource').length > 0")
            self.assertTrue(page.evaluate("document.getElementById('when').textContent").startswith("paused, as of"))
            asked = len(page.requests)
            page.evaluate("new Promise((done) => setTimeout(done, 2500))")
            self.assertLessEqual(len(page.requests), asked + 2)  # what was under way
            page.press("Enter")
            self.next_reading(page)
            self.assertEqual(page.complaints, [])

    def test_nothing_but_its_own_script_runs(self):
        with Daemon(DROPKVD) as daemon:
            page = self.open(daemon)
            page.evaluate("""(() => {
              const script = document.createElement("script");
              try { script.text = "window.foreign = 1"; document.body.append(script); } catch (refused) {}
              const button = document.createElement("button");
              try { button.setAttribute("onclick", "window.foreign = 1"); } catch (refused) {}
              document.body.append(button);
              button.click();
              try { new Function("window.foreign = 1")(); } catch (refused) {}
            })()""")
            self.assertIsNone(page.evaluate("window.foreign"))
            self.assertTrue([text for text in page.complaints if "Content Security Policy" in text or "Trusted" in text])
            self.assertEqual(page.evaluate("fetch('http://127.0.0.1:1/').then(() => 'went', (e) => 'refused')"), "refused")

    def test_a_daemon_that_is_gone_is_said_to_be_gone(self):
        with Daemon(DROPKVD) as daemon:
            page = self.open(daemon)
            daemon.ask(infer_request())
            self.next_reading(page)
            self.assertEqual(page.evaluate("document.getElementById('verdict-word').textContent"), "Serving")
            daemon.allowed_codes = (-signal.SIGKILL,)
            daemon.process.send_signal(signal.SIGKILL)
            page.wait("document.body.classList.contains('stale')")
            self.assertEqual(page.evaluate("document.getElementById('verdict-word').textContent"), "No answer from the daemon")
            self.assertIn(" old", page.evaluate("document.getElementById('reasons').textContent"))
            self.assertEqual(page.evaluate("document.querySelector('[data-series^=dropkv_worker_blocks]').textContent"), "1")
            self.assertTrue(page.evaluate("document.title").startswith("No answer"))

    def test_a_token_that_a_browser_sends_opens_the_page(self):
        token = "t" * 43
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(token + "\n")
            file.flush()
            with Daemon(DROPKVD, "--token-file", file.name) as daemon:
                page = self.browser.page(1280, 800)
                page.go("http://someone:%s@127.0.0.1:%d/" % (token, daemon.port))
                page.wait(READINGS + " >= 2")
                self.assertEqual(page.evaluate("document.getElementById('verdict-word').textContent"), "Serving")
                self.assertEqual(page.complaints, [])


if __name__ == "__main__":
    unittest.main(verbosity=1)
