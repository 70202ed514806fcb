"""A plugin of pytest under which the tests of llama.cpp's server (tools/server/tests) run with models of this machine, and what the
server answers is written down, request by request, in the place of what the tests assert, which is true of models that they bring
from elsewhere: python -O leaves assertions out. Two runs can be compared then (`test upstream`).
  RECORDED_MODEL, RECORDED_DRAFT  models; RECORDED_FA: -fa; RECORDED: the file of the answers, one JSON object in each line."""

import json
import os

import pytest
import utils

# What depends on time, on names of files, or on the number of a request.
LOOSE = {"timings", "created", "id", "timestamp", "t_start", "model_path", "build_info", "system_fingerprint", "generation_settings", "id_task"}
test = [""]


def strict(value):
    if isinstance(value, dict):
        return {key: strict(one) for key, one in value.items() if key not in LOOSE and not key.endswith("_ms")}
    if isinstance(value, list):
        return [strict(one) for one in value]
    return round(value, 2) if isinstance(value, float) else value


def write(what, answer):
    counts = answer.get("timings", {}) if isinstance(answer, dict) else {}
    line = {"test": test[0], "asked": what, "answer": strict(answer),
            "counts": {key: counts[key] for key in ("cache_n", "prompt_n", "predicted_n") if key in counts}}
    with open(os.environ["RECORDED"], "a") as file:
        file.write(json.dumps(line) + "\n")


def start(self, timeout_seconds=60):
    self.model_hf_repo = self.model_hf_file = self.model_url = None
    self.model_file = os.environ["RECORDED_MODEL"]
    self.offline = False
    self.model_draft = self.model_draft and os.environ["RECORDED_DRAFT"]
    self.fa = os.environ["RECORDED_FA"]
    self.n_threads = self.n_threads or 2
    plain_start(self, timeout_seconds)


def make_request(self, method, path, data=None, *more, **options):
    response = plain_request(self, method, path, data, *more, **options)
    if method != "GET":  # which is how tests wait
        write(f"{method} {path} {json.dumps(data)[:200]}", {"status": response.status_code, "timings": (response.body or {}).get("timings", {})
              if isinstance(response.body, dict) else {}, "body": response.body})
    return response


plain_start, plain_request = utils.ServerProcess.start, utils.ServerProcess.make_request
utils.ServerProcess.start, utils.ServerProcess.make_request = start, make_request
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.download_file = lambda *_, **__: os.environ["RECORDED_DRAFT"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    test[0] = item.nodeid
