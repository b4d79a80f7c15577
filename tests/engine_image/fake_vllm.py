"""A `vllm` command for the launcher's tests: a server of the paths that the launcher asks for, and some ways to die."""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = int(sys.argv[sys.argv.index("--port") + 1])
DEAD = "unhealthy" in sys.argv
SCALING = False
SCALING_BODY = b'{"error": "The model is currently scaling. Please try again later."}'
METRICS = b"""vllm:num_requests_running 0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""


class Handler(BaseHTTPRequestHandler):
    """Answers like vLLM, as far as the launcher looks."""

    def log_message(self, *_: Any) -> None:
        """Keeps the log for what the tests read."""

    def reply(self, status: int, body: bytes) -> None:
        """One whole answer."""
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Health, models, metrics, version."""
        bodies = {
            "/health": b"",
            "/v1/models": json.dumps({"data": [{"max_model_len": 64}]}).encode(),
            "/metrics": METRICS,
            "/version": b'{"version": "9.9", "accelerator": "H200"}',
            "/plimsoll/progress": b'{"step_seconds": 0.0}',
        }
        if SCALING:
            self.reply(503, SCALING_BODY)
            return
        self.reply(503 if DEAD and self.path == "/health" else 200, bodies[self.path])

    def do_POST(self) -> None:
        """Ends the engine, kills it, leaves an orphan, or answers a completion."""
        global DEAD, SCALING
        requested = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/exit0":
            os._exit(0)
        if self.path == "/dead":
            DEAD = True
        if self.path in ("/scaling", "/scaled"):
            SCALING = self.path == "/scaling"
        if "other-task" in sys.argv:
            self.reply(404, b'{"detail": "Not Found"}')
            return
        self.reply(200, json.dumps({"usage": {"completion_tokens": requested.get("max_tokens")}}).encode())


def main() -> None:
    """Serves until SIGTERM, which is a clean end; `orphan` in the arguments leaves a child behind."""
    if "broken" in sys.argv:
        sys.exit(3)
    if "--hf-token" in sys.argv:
        token = sys.argv[sys.argv.index("--hf-token") + 1]
        print(f"non-default args: {{'model': 'm', 'hf_token': '{token}'}}", flush=True)
    if "failing-core" in sys.argv:
        print("(EngineCore_DP0 pid=70) ERROR 11-26 03:00:00 [core.py:866] ValueError: no room for the KV cache")
        print("(APIServer pid=8) Traceback (most recent call last):")
        print('(APIServer pid=8)   File "api_server.py", line 1, in run\n' * 100)
        print("(APIServer pid=8) RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        sys.exit(1)
    if "other-task" in sys.argv:
        print("ImportError: no optional kernels", flush=True)
    print("Initializing a V1 LLM engine (v0) with config: none", flush=True)
    print("init engine (profile, create kv cache, warmup model) took 0.01 s", flush=True)
    if "orphan" in sys.argv:
        child = subprocess.Popen(["sleep", "1000"])
        print(f"orphan {child.pid}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()


if __name__ == "__main__":
    main()
