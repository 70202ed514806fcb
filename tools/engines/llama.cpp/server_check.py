#!/usr/bin/env python3
"""A conversation with llama-server through the client of OpenAI (package `openai`), as `test server` has it: two slots, a prompt
that goes on, one whose middle was removed, two requests at once, more tokens than the context has, and a restart with a saved
slot. Prints one JSON object: what was answered in each part, and how many tokens of the prompt were in the cache.
  server_check.py [--drafts TEMPERATURE | --kills] [--answers FILE] [--weights] SLOTS COMMAND ...
  SLOTS      a folder for saved slots
  COMMAND    the server, with its model; the port, slots and contexts are added here
  --drafts   another conversation, in which COMMAND says who drafts: of each part also how many tokens were drafted and accepted;
             tokens are sampled at this temperature, so that some that a good draft has foreseen do not come
  --kills    another conversation: the server is killed while it writes a long slot, at different moments, and files that are cut
             off are restored
  --answers  what another conversation printed: its answers are what has been said, whatever this one's are, so that each part
             can be compared by itself
  --weights  for each token of an answer also the logarithms of the probabilities of it and of the next best ones"""

import argparse
import atexit
import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai

STORY = ("The keeper of the lighthouse had lived on the island for thirty years. Every evening he climbed the stairs, lit the lamp and wrote "
         "one line into his book: which way the wind blew, how high the sea stood, which ships had passed. In spring the birds came from the "
         "south, in autumn they left, and he counted them. One night no ship passed, and yet a bell was heard from the water. He took his "
         "boat, rowed out, and found a buoy that had broken its chain, with a letter in a bottle tied to it. ")
QUESTIONS = ["What did the keeper write into his book?", "And what did he find one night?", "How long had he lived there?"]


OTHERS = 8  # tokens beside the one that was chosen


def weights_of(token):
    """Of a token: its number, and the logarithm of the probability of it and others by their numbers, which drafted ones have not."""
    others = token["top_logprobs"]
    return {"token": str(token["id"]), "of": {str(one["id"]): one["logprob"] for one in [*others, token]} if others else {}}


def without_count(said):
    return {part: value for part, value in said.items() if part != "cached"}


class Server:
    weights = False

    def __init__(self, command, slots, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = open(log, "a+b")
        self.process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(self.port), "--slot-save-path", slots],
                                        stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, cwd=slots,
                                        env=dict(os.environ, TMPDIR=str(slots), GGML_NO_BACKTRACE="1"))
        atexit.register(self.process.kill)  # also where a part of the conversation fails
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=300, max_retries=0)
        end = time.time() + 120
        while True:
            try:
                if self.call("/health")["status"] == "ok":
                    return
            except (OSError, json.JSONDecodeError):
                pass
            if self.process.poll() is not None or time.time() > end:
                self.fail("the server does not start")
            time.sleep(0.2)

    def fail(self, what):
        self.process.kill()
        self.log.seek(0)
        sys.exit(f"{what}:\n{self.log.read().decode(errors='replace')[-4000:]}")

    def has_said(self, line):
        self.log.seek(0)
        return line.encode() in self.log.read()

    def call(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def chat(self, messages, slot, tokens=12):
        more = {"logprobs": True, "top_logprobs": OTHERS} if self.weights else {}
        answer = self.client.chat.completions.create(model="any", messages=messages, max_tokens=tokens, temperature=0,
                                                     extra_body={"id_slot": slot, "cache_prompt": True}, **more)
        said = {"text": answer.choices[0].message.content, "cached": answer.model_extra["timings"]["cache_n"]}
        if self.weights:
            said["weights"] = [weights_of(one) for one in answer.to_dict()["choices"][0]["logprobs"]["content"]]
        return said

    def complete(self, prompt, slot, tokens):
        answer = self.call("/completion", {"prompt": prompt, "n_predict": tokens, "temperature": 0, "id_slot": slot, "ignore_eos": True,
                                           "return_tokens": True, "n_probs": OTHERS if self.weights else 0})
        said = {"text": answer["content"], "tokens": len(answer["tokens"]), "shifted": answer["truncated"]}
        if self.weights:
            said["weights"] = [weights_of(one) for one in answer["completion_probabilities"]]
        return said

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(60) not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
            self.fail(f"the server ended with {self.process.returncode}")

    def kill(self):
        self.process.kill()
        self.process.wait()


def talk(question, answers):
    messages = [{"role": "system", "content": "You answer questions about a story. " + STORY}]
    for asked, answer in zip(QUESTIONS, answers):
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return messages + [{"role": "user", "content": question}]


def drafted(server, messages, slot):
    more = {"logprobs": True, "top_logprobs": OTHERS} if server.weights else {}
    answer = server.client.chat.completions.create(model="any", messages=messages, max_tokens=48, temperature=server.temperature, seed=5,
                                                   extra_body={"id_slot": slot, "cache_prompt": True}, **more)
    timings = answer.model_extra["timings"]
    said = {"text": answer.choices[0].message.content, "drafted": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0)}
    if server.weights:
        said["weights"] = [weights_of(one) for one in answer.to_dict()["choices"][0]["logprobs"]["content"]]
    return said


def conversation_with_drafts(start, temperature, answers):
    """Answers that repeat the story in parts, so that drafts of a text's own words are accepted in parts as well."""
    server = start()
    server.temperature = temperature
    said = {}
    ask = [{"role": "system", "content": STORY}, {"role": "user", "content": "Tell me the story again, word for word. " + STORY}]
    said["first turn"] = drafted(server, ask, 0)
    first = (answers or said)["first turn"]
    again = [*ask, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "Go on."}]
    said["second turn"] = drafted(server, again, 0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        both = [pool.submit(drafted, server, again[:-1] + [{"role": "user", "content": "And then?"}], 0),
                pool.submit(drafted, server, ask[:1] + [{"role": "user", "content": QUESTIONS[0] + STORY}], 1)]
        said["both slots, 0"], said["both slots, 1"] = (one.result() for one in both)
    said["back again"] = drafted(server, again, 0)
    server.stop()
    return said


def conversation(start, slots, answers):
    server = start()
    said = {}
    heard = answers or said
    said["first turn"] = server.chat(talk(QUESTIONS[0], []), 0)
    first = heard["first turn"]["text"]
    said["second turn"] = server.chat(talk(QUESTIONS[1], [first]), 0)
    second = heard["second turn"]["text"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        both = [pool.submit(server.chat, talk(QUESTIONS[2], [first, second]), 0),
                pool.submit(server.chat, talk("Who is it about?", []), 1)]
        # Where both need a cell, one loses what it had: which one is the first that comes.
        said["both slots, 0"], said["both slots, 1"] = (without_count(one.result()) for one in both)
    # The first question is gone, so what follows it moves to the front.
    shorter = talk(QUESTIONS[2], [first, second])
    said["middle removed"] = server.chat([shorter[0], *shorter[3:]], 0)
    said["saved"] = {"tokens": server.call("/slots/0?action=save", {"filename": "kept"})["n_saved"]}
    room = server.call("/props")["default_generation_settings"]["n_ctx"]
    words = server.call("/tokenize", {"content": STORY * 8})["tokens"]
    said["longer than the context"] = server.complete(words[:room - 10], 1, 32)
    said["the other slot, 0"] = without_count(server.chat([shorter[0], *shorter[3:]], 0))
    # Others take both slots: what was there is kept in the server's memory, and comes back.
    for word in ("apple", "house", "river"):
        server.chat([{"role": "user", "content": " ".join(f"{word} {i}" for i in range(70))}], -1, 2)
    said["left and back"] = server.chat([shorter[0], *shorter[3:]], -1)
    server.stop()

    server = start()
    said["restored"] = {"tokens": server.call("/slots/0?action=restore", {"filename": "kept"})["n_restored"]}
    said["after the restart"] = server.chat([shorter[0], *shorter[3:], {"role": "assistant", "content": heard["middle removed"]["text"]},
                                             {"role": "user", "content": "Tell me more."}], 0)
    # One that is killed leaves nothing behind, and the file that was there.
    before = set(os.listdir(slots))
    stream = server.client.completions.create(model="any", prompt=STORY, max_tokens=200, stream=True, temperature=0)
    next(iter(stream))
    server.kill()
    said["left by a killed one"] = sorted(set(os.listdir(slots)) - before)
    server = start()
    said["after the kill"] = {"tokens": server.call("/slots/0?action=restore", {"filename": "kept"})["n_restored"]}
    server.stop()
    return said


KILLED_AT = [0, 0.1, 0.3, 0.5, 0.7, 0.9]  # parts of the file that are written
CUT_AT = [0, 6, 12, 2000, 0.01, 0.5, -1]  # bytes, a part of the file, or so many before its end
FEWEST_CUT = 3
REFUSED = "400: Unable to restore slot: No available space in KV cache or invalid slot save file"


def restore(server, slot, name):
    """Tokens; the server's refusal; or None, where it has ended itself: llama.cpp's reader gives what follows the end of a file as if
    it was there, and compares how much that was when all of it is restored."""
    try:
        return server.call(f"/slots/{slot}?action=restore", {"filename": name})["n_restored"]
    except urllib.error.HTTPError as refusal:
        return f"{refusal.code}: {json.load(refusal)['error']['message']}"
    except (OSError, http.client.HTTPException):
        if server.process.wait(60) != -signal.SIGABRT or not server.has_said("GGML_ASSERT(nread <= state_size) failed"):
            server.fail(f"the server ended with {server.process.returncode} over {name}")
        return None


def kill_while_saving(server, path, part, whole):
    """Kills it as soon as the file has so much of its bytes, or is whole."""

    def save():
        with contextlib.suppress(OSError, http.client.HTTPException):  # it is killed meanwhile
            server.call("/slots/0?action=save", {"filename": path.name})

    saving = threading.Thread(target=save)
    saving.start()
    while saving.is_alive() and not (path.exists() and path.stat().st_size >= part * whole):
        pass
    server.kill()
    saving.join()
    return path.stat().st_size


def conversation_with_kills(start, slots):
    """llama.cpp writes a slot's file in its place, and renames none: what is cut off must be restored by nobody, whatever was in the slot."""
    slots = Path(slots)
    server = start()
    room = server.call("/props")["default_generation_settings"]["n_ctx"]
    words = server.call("/tokenize", {"content": STORY * 40})["tokens"][:room - 40]
    said = {"long": server.complete(words, 0, 12)}
    said["saved"] = server.call("/slots/0?action=save", {"filename": "kept"})["n_saved"]
    server.stop()
    kept = (slots / "kept").read_bytes()
    cut = {}
    for part in KILLED_AT:
        server = start()
        if restore(server, 0, "kept") != said["saved"]:
            server.fail("the older file is not restored")
        path = slots / f"again {part}"
        size = kill_while_saving(server, path, part, len(kept))
        if (slots / "kept").read_bytes() != kept or not kept.startswith(path.read_bytes()):
            server.fail(f"a server that was killed at {part} of the file has changed the older file, or written other bytes")
        if size < len(kept):
            cut[path.name] = size
    if len(cut) < FEWEST_CUT:
        server.fail(f"of {len(KILLED_AT)} servers that were killed while they saved {len(cut)} left a part of a file, needed: {FEWEST_CUT}")
    for at in CUT_AT:
        size = int(at * len(kept)) if isinstance(at, float) else at % len(kept)
        cut[f"cut at {at}"] = size
        (slots / f"cut at {at}").write_bytes(kept[:size])
    # One server goes through all of them, with the long prompt in the slot and with nothing, until it ends.
    server = start()
    ended = 0
    for name, size in cut.items():
        for filled in (True, False):
            if filled and restore(server, 0, "kept") != said["saved"]:
                server.fail(f"the whole file is not restored behind {size} bytes of it")
            answer = restore(server, 0, name)
            if answer is None:
                ended += 1
                server = start()
            elif answer != REFUSED:
                server.fail(f"{name}: {size} of {len(kept)} bytes are answered by {answer}")
    print(f"{len(kept)} bytes, of which {sorted(cut.values())} were written by killed servers or are cut: {2 * len(cut) - ended} times refused, "
          f"{ended} times llama.cpp has ended itself", file=sys.stderr)
    said["the other slot"] = server.complete(words[50:400], 1, 8)
    if restore(server, 0, "cut at 0") != REFUSED:
        server.fail("an empty file is not refused")
    again = server.complete(words, 0, 12)
    if again != said["long"]:
        server.fail(f"behind refused files the long prompt is answered by {again}")
    said["restored"] = restore(server, 0, "kept")
    said["goes on"] = server.complete(words + server.call("/tokenize", {"content": said["long"]["text"]})["tokens"], 0, 12)
    said["the other slot goes on"] = server.complete(words[50:430], 1, 8)
    server.stop()
    return said


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=float)
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("slots", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    arguments.slots.mkdir(parents=True, exist_ok=True)
    log = arguments.slots.with_suffix(".log")
    log.unlink(missing_ok=True)
    slots = str(arguments.slots.resolve())

    def start():
        return Server(arguments.command, slots, log)

    Server.weights = arguments.weights
    answers = arguments.answers and json.loads(arguments.answers.read_text())
    if arguments.kills:
        said = conversation_with_kills(start, slots)
    elif arguments.drafts is None:
        said = conversation(start, slots, answers)
    else:
        said = conversation_with_drafts(start, arguments.drafts, answers)
    print(json.dumps(said))


main()
