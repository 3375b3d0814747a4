#!/usr/bin/env python3
"""panel.py PAGE TENSORS : called by .ci/panel. Clicks through the page as a reader would, with the mouse and the keyboard of a headless
Chromium, over DevTools' protocol. Fails unless each click changes which tokens are highlighted, and into the attention weights of what
was chosen: those are computed from the tensors here, in plain Python. Fails too if a script of the page fails or the page asks for
anything but itself.
"""

import json, math, os, pathlib, re, select, struct, subprocess, sys, tempfile, time
from array import array
from operator import mul

HEAD_DIM = 32
SECONDS = 60  # for an answer of the browser


def read_tensors(path):
    """name -> rows of numbers, from a safetensors file."""
    data = pathlib.Path(path).read_bytes()
    (header_len,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_len])
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + header_len + offset for offset in info["data_offsets"])
        numbers, width = array("f", data[start:end]), info["shape"][-1]
        tensors[name] = [numbers[i : i + width] for i in range(0, len(numbers), width)]
    return tensors


class Layer:
    def __init__(self, path):
        self.tensors = read_tensors(path)
        self.keys = {}

    def project(self, name, head, token):
        """x W^T + b for one head."""
        weight, bias, x = self.tensors["w_" + name], self.tensors["b_" + name][0], self.tensors["x"][token]
        return [sum(map(mul, x, weight[d])) + bias[d] for d in range(head * HEAD_DIM, (head + 1) * HEAD_DIM)]

    def weights(self, head, token, causal):
        count = len(self.tensors["x"])
        if head not in self.keys:
            self.keys[head] = [self.project("k", head, key) for key in range(count)]
        q = self.project("q", head, token)
        exps = [math.exp(sum(map(mul, q, k)) / math.sqrt(HEAD_DIM)) for k in self.keys[head]]
        if causal:
            exps[token + 1 :] = [0.0] * (count - token - 1)
        return [exp / sum(exps) for exp in exps]


class Browser:
    """A tab of a headless Chromium that reads commands from its descriptor 3 and answers on 4."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (commands_out, self.commands), (self.answers, answers_in) = os.pipe(), os.pipe()

        def hand_over():
            ends = os.dup(commands_out), os.dup(answers_in)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        # Without a sandbox, which root may not have: the page is ours.
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--window-size=1200,900"]
        command = ["chromium", *options, "--remote-debugging-pipe", "--user-data-dir=" + self.profile.name, "about:blank"]
        self.process = subprocess.Popen(command, preexec_fn=hand_over, close_fds=False, stderr=subprocess.DEVNULL)
        os.close(commands_out)
        os.close(answers_in)
        self.last_id, self.buffer, self.events, self.session = 0, b"", [], None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Network"]:
            self.ask(domain + ".enable")

    def close(self):
        self.process.terminate()
        self.process.wait(SECONDS)
        self.profile.cleanup()

    def message(self, deadline):
        while b"\0" not in self.buffer:
            if not select.select([self.answers], [], [], max(0, deadline - time.monotonic()))[0]:
                sys.exit("panel: the browser does not answer")
            read = os.read(self.answers, 1 << 20)
            if not read:
                sys.exit("panel: the browser has ended")
            self.buffer += read
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def ask(self, method, **params):
        self.last_id += 1
        command = {"id": self.last_id, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            message = self.message(deadline)
            if message.get("id") == self.last_id:
                if "error" in message:
                    sys.exit(f"panel: {method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def wait_for(self, event):
        deadline = time.monotonic() + SECONDS
        while not any(message.get("method") == event for message in self.events):
            self.events.append(self.message(deadline))

    def evaluate(self, expression):
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            sys.exit(f"panel: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def click(self, element):
        """`element` is an expression of the page."""
        x, y = self.evaluate(
            f"(() => {{ const e = {element}; e.scrollIntoView({{ block: 'center' }});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ["mousePressed", "mouseReleased"]:
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key):
        for kind in ["keyDown", "keyUp"]:
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=40)


def highlights(browser):
    """How much of its colour each token has: the root of its weight."""
    colors = browser.evaluate("[...document.querySelectorAll('#text button')].map(b => getComputedStyle(b).backgroundColor)")
    alphas = []
    for color in colors:
        numbers = [float(number) for number in re.findall(r"[\d.]+", color)]
        alphas.append(numbers[3] if len(numbers) == 4 else 1.0)
    return alphas


def main(page, tensors):
    layer, browser = Layer(tensors), Browser()
    try:
        url = pathlib.Path(page).resolve().as_uri()
        browser.ask("Page.navigate", url=url)
        browser.wait_for("Page.loadEventFired")
        before = highlights(browser)
        if len(before) != len(layer.tensors["x"]) or any(before):
            sys.exit(f"panel: {len(before)} tokens, some of them highlighted before any click")

        def token(index):
            return lambda: browser.click(f"document.querySelectorAll('#text button')[{index}]")

        def next_heads(count):
            browser.evaluate("document.getElementById('head').focus()")
            for _ in range(count):
                browser.press("ArrowDown")

        steps = [  # what is done, and the (head, token, causal) that must be shown then
            ("a click on token 73", token(73), (0, 73, False)),
            ("a click on token 226", token(226), (0, 226, False)),
            ("head 9 chosen", lambda: next_heads(9), (9, 226, False)),
            ("a click on causal", lambda: browser.click("document.querySelector('[value=causal]')"), (9, 226, True)),
            ("a click on token 65", token(65), (9, 65, True)),
            ("a click on full", lambda: browser.click("document.querySelector('[value=full]')"), (9, 65, False)),
        ]
        for name, act, (head, index, causal) in steps:
            act()
            after = highlights(browser)
            if after == before:
                sys.exit(f"panel: {name} does not change what is highlighted")
            expected = layer.weights(head, index, causal)
            for key, (found, weight) in enumerate(zip(after, expected)):
                if abs(found - math.sqrt(weight)) > 0.005 or (causal and key > index and found != 0):
                    sys.exit(f"panel: after {name}, token {key} is coloured {found}, its weight is {weight}")
            best = max(range(len(expected)), key=expected.__getitem__)
            first = browser.evaluate("document.querySelector('#most li').innerText").split()
            if f"{100 * expected[best]:.1f}" not in first:
                sys.exit(f"panel: after {name}, the list begins with {first}, not with token {best} at {expected[best]}")
            print(f"{name}: token {index} looks most at token {best}, {100 * expected[best]:.1f} %")
            before = after

        requests = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
        failures = [e["params"] for e in browser.events if e.get("method") == "Runtime.exceptionThrown"]
        if failures or requests != [url]:
            sys.exit(f"panel: failures {failures}, requests {requests}")
    finally:
        browser.close()


main(*sys.argv[1:])
