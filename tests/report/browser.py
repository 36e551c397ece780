"""A real Chromium without a window, driven over a pipe in its DevTools protocol: no driver, no socket, no network.

https://chromedevtools.github.io/devtools-protocol/ names the methods and events.
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
DESKTOP, PHONE = (1280, 900), (390, 844)


class Browser:
    """One browser process; pages are opened one after the other in it."""

    def __init__(self, profile, deadline_s=60.0):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self._deadline_s, self._buffer, self._number, self._events = deadline_s, b"", 0, []
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   "--hide-scrollbars", "--disable-background-networking", f"--user-data-dir={profile}",
                   "--remote-debugging-pipe"]  # fmt: skip
        # The browser reads commands from descriptor 3 and writes to 4; these numbers may be taken on our side.
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, CHROMIUM, *options],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "CSS"):
            self.call(f"{domain}.enable")

    def close(self):
        """End the browser and whatever it has started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(self._deadline_s)
        os.close(self._out)
        os.close(self._in)

    def call(self, method, **params):
        """Call a method and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._events.append(answer)

    def open(self, path, *, size=DESKTOP, dark=False, scripts=True):
        """Open a file as a person would, and return seconds until its charts are drawn, None without scripts."""
        self._events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=size[0] < 700,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._wait_for(lambda: any(event.get("method") == "Page.loadEventFired" for event in self._events))
        if not scripts:
            return None
        self._wait_for(
            lambda: self.value(
                "document.documentElement.dataset.ready || document.querySelector('.problem')?.textContent"
            )
        )
        return float(self.value("document.documentElement.dataset.ready || 'nan'")) / 1000

    def value(self, expression):
        """Return what an expression gives in the page, a promise awaited."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def choose(self, element, option):
        """Choose an option, or a place on a slider, as a person does."""
        return self.value(
            f"(() => {{ const e = document.getElementById({json.dumps(element)}); e.value = {json.dumps(option)};"
            f" e.dispatchEvent(new Event('input', {{bubbles: true}})); return e.value; }})()"
        )

    def wait_until(self, expression):
        """Wait until an expression is true in the page."""
        self._wait_for(lambda: self.value(expression))

    def problems(self):
        """Return what the page has written as errors, and what it has asked of any network."""
        self.value("0")
        told = [event for event in self._events if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
        errors = [event for event in told if event["params"].get("entry", {}).get("level") != "info"]
        errors += [
            event
            for event in self._events
            if event.get("method") == "Runtime.consoleAPICalled"
            and event["params"]["type"] in ("error", "warning", "assert")
        ]
        urls = [
            event["params"]["request"]["url"]
            for event in self._events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [*errors, *(url for url in urls if not url.startswith(("file:", "data:", "blob:")))]

    def screenshot(self, path, whole=True):
        """Write the page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png", **self._clip(whole))
        path.write_bytes(base64.b64decode(shot["data"]))

    def _clip(self, whole):
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _wait_for(self, is_true):
        end = time.monotonic() + self._deadline_s
        while not is_true():
            assert time.monotonic() < end, "the page did not get there in time"
            time.sleep(0.02)
            self.call("Page.getFrameTree")

    def _receive(self):
        end = time.monotonic() + self._deadline_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser did not answer in time"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
