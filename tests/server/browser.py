"""Headless Chromium by its DevTools protocol over two pipes. Standard library only.

usage in a test:
    with Browser() as browser:
        page = browser.page(1280, 800, "dark")
        page.go("http://127.0.0.1:8480/")
        page.wait("document.title !== ''")
"""
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

PATIENCE_S = 60


def program():
    """Chromium's path, or None."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return shutil.which(name)
    return None


class Browser:
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="dropkvd-browser")
        to_read, self.to = os.pipe()
        self.origin, to_write = os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--no-first-run", "--disable-extensions", "--hide-scrollbars", "--force-color-profile=srgb",
                   "--disable-background-networking", "--user-data-dir=" + self.folder.name]
        # The browser reads commands from descriptor 3 and answers on 4.
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", 'exec "$@" 3<&%d 4>&%d' % (to_read, to_write), "sh", program(), *options, "about:blank"],
            pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.buffer = b""
        self.number = 0
        self.pages = {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        try:
            self.send("Browser.close")
        except BrokenPipeError:
            pass
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.to)
        os.close(self.origin)
        self.folder.cleanup()

    def send(self, method, params=None, session=None):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        return self.number

    def receive(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.origin, 1 << 20)
            if not piece:
                raise ConnectionError("the browser ended")
            self.buffer += piece
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, params=None, session=None):
        """The result; events on the way go to their pages."""
        number = self.send(method, params, session)
        while True:
            message = self.receive()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError("%s: %s" % (method, message["error"]["message"]))
                return message["result"]
            if message.get("sessionId") in self.pages:
                self.pages[message["sessionId"]].note(message)

    def page(self, width, height, scheme="light", reduced_motion=False):
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        self.pages[session] = page
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            page.call(domain + ".enable")
        page.resize(width, height)
        page.scheme(scheme)
        return page


class Page:
    def __init__(self, browser, session):
        self.browser, self.session = browser, session
        self.complaints = []  # what the console would show in red
        self.requests = []

    def call(self, method, params=None):
        return self.browser.call(method, params, self.session)

    def note(self, message):
        params = message["params"]
        if message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif message["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride",
                  {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})

    def scheme(self, scheme):
        self.call("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def header(self, name, value):
        self.call("Network.setExtraHTTPHeaders", {"headers": {name: value}})

    def go(self, url):
        self.call("Page.navigate", {"url": url})

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True,
                                                "allowUnsafeEvalBlockedByCSP": False})
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", expression))
        return result["result"].get("value")

    def wait(self, expression):
        """Asks again until it is true; each question is a round trip."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                value = self.evaluate(expression)
            except RuntimeError:
                value = None  # the document is being replaced
            if value:
                return value
            if time.monotonic() > deadline:
                raise AssertionError("never: " + expression)

    def press(self, key):
        """Tab or Enter."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": {"Tab": 9, "Enter": 13}[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", **event, **text})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    def shoot(self, path):
        """The whole page, however long."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        data = self.call("Page.captureScreenshot", {
            "captureBeyondViewport": True,
            "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}})["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
