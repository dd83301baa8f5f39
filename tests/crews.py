"""What workers do in tests/test_bench_gpu.py, in a file that every worker can import quickly."""

import os
import time


def serve(names, answer, begin=""):
    """Dies, hangs, leaves or answers, as each name says."""
    if begin == "fails":
        print("there is no paper", flush=True)
        os._exit(3)
    for name in names:
        answer([{"said": f"{begin}{name}", "by": os.getpid()}])
        if name == "dies":
            print("out of ink", flush=True)
            os._exit(7)
        if name == "hangs":
            time.sleep(600)
        if name == "leaves":
            return


def serve_verdicts(names, answer, device, dry, only):
    """Answers each name with itself as the verdict, of fastattn's row and a rival's."""
    for name in names:
        row = {"contender": "fastattn", "verdict": name, "note": f"it is {name}"}
        if name == "dies":
            answer([row | {"verdict": "right", "family": "fastattn"}])
            os._exit(7)
        answer([row | {"family": "fastattn"}, row | {"family": "torch", "verdict": "wrong"}])
