#!/usr/bin/env python3
"""The page of `apa report` in a real browser: headless Chromium, driven over a pair of pipes.

    report_browser.py APA DUMP [--shots FOLDER]

Makes pages of a dump of a real layer and opens them with no network. Checked: the page is built without an error or a
message in its console and asks for nothing but its own file; at desktop and at phone width, in light and in dark colours,
nothing sticks out to the side; the sink column and the diagonal are hot in the pixels of the map, and every cell's pixel is
what the verdicts of `apa eval` say; keyboard, pointer, head and theme choosers do what they say; text from a file stays text.
Exit status 77 without a browser: the test is skipped. --shots leaves pictures for people to look at.

Only the standard library: the DevTools protocol as JSON, each message ended by a zero byte, on file descriptors 3 (to the
browser) and 4 (from it), which is what --remote-debugging-pipe means.
"""
import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDE, PHONE = (1280, 900), (390, 844)
LIMIT = 180  # seconds that any single step may take


class Browser:
    """One browser with one page."""

    def __init__(self, program, folder):
        to_read, self.to_write = os.pipe()
        self.from_read, from_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
                 "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", f"--user-data-dir={folder}",
                 "--remote-debugging-pipe", "about:blank"]

        def wire():  # in the child: the two ends become 3 and 4, whatever they were
            a, b = os.dup(to_read), os.dup(from_write)
            a, b = (os.dup(a), os.dup(b)) if {a, b} & {3, 4} else (a, b)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen([program, *flags], preexec_fn=wire, close_fds=False, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(from_write)
        self.number, self.buffer, self.events = 0, b"", []
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)

    def receive(self):
        end = time.monotonic() + LIMIT
        while b"\0" not in self.buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.from_read], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self.from_read, 1 << 16)
            if not chunk:
                raise RuntimeError("the browser is gone")
            self.buffer += chunk
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.to_write, data):]
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def run(self, script):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, path, size, dark):
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=size is PHONE)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        end = time.monotonic() + LIMIT
        while self.run("location.protocol + document.documentElement?.dataset.ready") != "file:yes":
            if time.monotonic() > end:
                raise TimeoutError(f"{path} does not get ready: {self.complaints()}")
            time.sleep(0.02)
        self.frames()

    def frames(self):
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))")

    def complaints(self):
        """What the page said, threw or asked for."""
        found = []
        for event in self.events:
            method, p = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append("threw " + json.dumps(p["exceptionDetails"])[:400])
            elif method == "Runtime.consoleAPICalled":
                found.append("said " + json.dumps(p["args"])[:400])
            elif method == "Log.entryAdded" and "willReadFrequently" not in p["entry"]["text"]:  # this test reads pixels
                found.append("log: " + p["entry"]["text"])
            elif method == "Network.requestWillBeSent" and not p["request"]["url"].startswith(("file://", "data:", "about:")):
                found.append("asked for " + p["request"]["url"])
        return found

    def requests(self):
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def key(self, name):
        text = name if len(name) == 1 else ""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, text=text if kind == "keyDown" else "")
        self.frames()

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frames()

    def shot(self, path, whole=True):
        image = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": self.extent()} if whole else {}))
        with open(path, "wb") as file:
            file.write(base64.b64decode(image["data"]))

    def extent(self):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def close(self):
        try:
            self.session = None
            self.call("Browser.close")
        except (RuntimeError, TimeoutError, OSError):
            self.process.kill()
        self.process.wait(LIMIT)


checks = 0


def check(holds, what):
    global checks
    checks += 1
    if not holds:
        raise AssertionError(what)


def unpack(grid, head):
    """Cells of a head as rows of verdicts."""
    data = base64.b64decode(grid["heads"][head]["cells"])
    return [[data[i >> 2] >> 2 * (i & 3) & 3 for i in range(y * grid["width"], (y + 1) * grid["width"])] for y in range(grid["height"])]


# Colour of the pixel in the middle of every cell of the map on the page, as "r,g,b".
PIXELS = """(() => {
  const canvas = document.getElementById("map"), [x, y, w, h] = canvas.dataset.plot.split(",").map(Number);
  const context = canvas.getContext("2d"), image = context.getImageData(0, 0, canvas.width, canvas.height), W = %d, H = %d, out = [];
  for (let j = 0; j < H; j++) for (let i = 0; i < W; i++) {
    const at = 4 * (Math.floor(y + (j + 0.5) * h / H) * canvas.width + Math.floor(x + (i + 0.5) * w / W));
    out.push(image.data.slice(at, at + 3).join());
  }
  return out;
})()"""
COLOURS = """["cold", "hot", "skipped", "invisible"].map(name => {
  const text = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  return [1, 3, 5].map(i => parseInt(text.slice(i, i + 2), 16)).join();
})"""


def check_map(browser, grid, head, name):
    """Pixels of the map against the verdicts; the sink and the diagonal are hot."""
    W, H = grid["width"], grid["height"]
    colours, pixels, cells = browser.run(COLOURS), browser.run(PIXELS % (W, H)), unpack(grid, head)
    check(len(set(colours)) == 4, f"{name}: four colours, found {colours}")
    wrong = sum(pixels[y * W + x] != colours[cells[y][x]] for y in range(H) for x in range(W))
    check(wrong == 0, f"{name}: {wrong} of {W * H} cells have another colour than their verdict")
    sink = sum(pixels[y * W] == colours[1] for y in range(H))
    check(sink == H, f"{name}: the sink column is hot in {sink} of {H} rows")
    keys = grid["tile"] * grid["tiles_per_cell"]
    diagonal = sum(pixels[y * W + (grid["q_offset"] + min((y + 1) * grid["rows_per_cell"], grid["rows"]) - 1) // keys] == colours[1] for y in range(H))
    check(diagonal == H, f"{name}: the diagonal is hot in {diagonal} of {H} rows")
    hot = sum(p == colours[1] for p in pixels)
    check(hot < 0.5 * W * H, f"{name}: {hot} of {W * H} cells are hot, so hot says nothing")


def check_width(browser, width, name):
    """A window that is too narrow gets a wider view on phones, so the width that was asked for counts."""
    check(browser.run(f"document.documentElement.scrollWidth <= {width}"), f"{name}: the page is wider than the window: " + str(browser.run(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > WIDTH + 1 && !e.closest('.scroll, .heads')).slice(0, 5).map(e => e.outerHTML.slice(0, 120))".replace("WIDTH", str(width)))))


def check_frontier(browser, path, name):
    """Settings that no other beats: what the page finds against the marks of apa sweep."""
    with open(path, encoding="utf-8") as file:
        rows = json.load(file)["rows"]
    expected = sorted(" ".join([row["method"], *(f"{k}={v}" for k, v in row["knobs"].items())]) for row in rows if row["cost"]["zen4"]["pareto"])
    found = browser.run("(() => { const rows = [...document.querySelectorAll('[aria-label=\"Error against cost\"] tbody tr')]; return rows.filter(r => r.cells[7].textContent === 'yes').map(r => r.cells[0].textContent); })()")
    check(sorted(found) == expected, f"{name}: none better: {found}, expected {expected}")


def check_use(browser, grid):
    """Keyboard, pointer and choosers."""
    text = "document.getElementById('map-readout').textContent"
    browser.run("document.getElementById('map').focus()")
    browser.key("End")
    browser.key("Home")
    check("tile 0)" in browser.run(text), "Home leads to tile 0: " + browser.run(text))
    check(": hot" in browser.run(text), "the sink is hot: " + browser.run(text))
    browser.key("ArrowRight")
    check("tile 1)" in browser.run(text), "an arrow leads to tile 1: " + browser.run(text))
    drawn = "document.getElementById('map').toDataURL()"
    before = browser.run(drawn)
    browser.key("+")
    check(before != browser.run(drawn), "+ zooms")
    browser.key("0")
    check(before == browser.run(drawn), "0 shows the whole map again")
    browser.key("Escape")
    box = browser.run("(() => { const c = document.getElementById('map'); c.scrollIntoView({block: 'center'}); const b = c.getBoundingClientRect(), p = c.dataset.plot.split(',').map(Number); return [b.left + p[0], b.top + p[1], p[2], p[3]]; })()")
    browser.mouse("mouseMoved", box[0] + 1, box[1] + 1)
    check("tile 0)" in browser.run(text), "the pointer is over tile 0: " + browser.run(text))
    browser.run("document.querySelectorAll('.heads button')[1].click()")
    browser.frames()
    check(browser.run("document.querySelectorAll('.heads button')[1].getAttribute('aria-pressed')") == "true", "head 1 is pressed")
    browser.run("document.getElementById('map').blur()")
    browser.frames()
    check_map(browser, grid, 1, "head 1")
    browser.run("[...document.querySelectorAll('button')].find(b => b.textContent === 'map').click()")
    browser.frames()
    check(browser.run("document.activeElement.id") == "map" and "Queries at" in browser.run(text), "the worst pair is shown on the map")
    browser.run("document.getElementById('map').blur()")
    # Everything that can be operated can be reached with the Tab key and has a name.
    unnamed = browser.run("[...document.querySelectorAll('button, select, [tabindex=\"0\"]')].filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).length")
    check(unnamed == 0, f"{unnamed} controls have no name")
    browser.run("(() => { const t = document.getElementById('theme'); t.value = 'dark'; t.dispatchEvent(new Event('change')); })()")
    browser.frames()
    check(browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 23, 28)", "the theme chooser makes it dark")
    browser.run("document.querySelectorAll('.heads button')[0].click()")
    browser.frames()
    check_map(browser, grid, 0, "dark by hand")
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.frames()


def apa(command, *arguments):
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise AssertionError(f"apa {' '.join(arguments)}: exit {done.returncode}: {done.stderr}")


def make_pages(command, dump, folder):
    """One result; several with a sweep; a name that is no HTML."""
    at = lambda name: os.path.join(folder, name)
    apa(command, "eval", "--dump", dump, "--map", "--worst", "5", "--histogram", "--per-head", "--repeats", "1", "--json", at("eval.json"))
    apa(command, "report", "--dump", dump, "--repeats", "1", "--out", at("one.html"))
    apa(command, "sweep", "--dump", dump, "--method", "apa,cold", "--over", "eps=0.005,0.02,0.1", "--json", at("sweep.json"))
    apa(command, "report", "--dump", dump, "--compare", "exact,apa,cold", "--repeats", "1", "--from", at("sweep.json"), "--out", at("many.html"))
    apa(command, "report", "--from", at("sweep.json"), "--out", at("sweep.html"))
    with open(at("eval.json"), encoding="utf-8") as file:
        result = json.load(file)
    evil = dict(result, method="</script><script>document.title='taken'</script><img src=x onerror=alert(1)>", map=None)
    del evil["map"]
    with open(at("evil.json"), "w", encoding="utf-8") as file:
        json.dump([evil, result], file)
    apa(command, "report", "--from", at("evil.json"), "--out", at("evil.html"))
    return result["map"]


def look(browser, folder, grid, shots):
    for name in ("one", "many", "sweep", "evil"):
        for size in (WIDE, PHONE):
            for dark in (False, True):
                what = f"{name}, {size[0]} wide, {'dark' if dark else 'light'}"
                browser.open(os.path.join(folder, name + ".html"), size, dark)
                check_width(browser, size[0], what)
                if name == "one" and size is WIDE:
                    check_map(browser, grid, 0, what)
                if shots:
                    browser.shot(os.path.join(shots, f"{name}-{size[0]}-{'dark' if dark else 'light'}.png"))
                empty = browser.run("[...document.querySelectorAll('.chart canvas')].filter(c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; return !d.some(v => v); }).length")
                check(empty == 0, f"{what}: {empty} charts are empty")
                check(browser.run("!document.title.includes('taken') && document.querySelectorAll('img').length === 0"), f"{what}: text of a file became HTML")
                if name == "sweep":
                    check_frontier(browser, os.path.join(folder, "sweep.json"), what)
                if name == "one" and size is WIDE and not dark:
                    check_use(browser, grid)
                check(not browser.complaints(), f"{what}: {browser.complaints()}")
                check(len([u for u in browser.requests() if u.startswith("file:")]) == 1, f"{what}: one file alone, asked for {browser.requests()}")


def main():
    command, dump = os.path.abspath(sys.argv[1]), sys.argv[2]
    shots = sys.argv[4] if len(sys.argv) > 4 and sys.argv[3] == "--shots" else None
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        print("skipped: no browser (" + ", ".join(BROWSERS) + ") to open the page of apa report in")
        return 77
    with tempfile.TemporaryDirectory(prefix="apa-report-") as folder:
        grid = make_pages(command, dump, folder)
        browser = Browser(program, os.path.join(folder, "profile"))
        try:
            look(browser, folder, grid, shots)
        finally:
            browser.close()
    print(f"{checks} checks of the report in {os.path.basename(program)} hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
