"""`incseg demo`: a local web page to play with one model, or two side by side."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import webbrowser
from pathlib import Path
from types import FrameType

from incseg.demo.models import Models
from incseg.demo.server import DEFAULT_PORT, DemoServer

HELP = "a local web page: drop an image, see mask, uncertainty and probabilities"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "run folder, a folder of its steps/, or a .safetensors model"
    parser.add_argument("model", metavar="MODEL", type=Path, help=model)
    parser.add_argument("other", metavar="MODEL2", type=Path, nargs="?", help="another, to compare side by side")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0 for any free one (default: {DEFAULT_PORT})")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--method", metavar="NAME", help="of a model trained by your own package.module:Class: its name"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default: auto)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.epilog = "Images stay on this machine, in memory. Ctrl-C ends it. A run given twice compares its steps."


def run(args: argparse.Namespace) -> int:
    paths = [path for path in (args.model, args.other) if path is not None]
    server = DemoServer(Models(paths, args.device, args.threads, args.method), args.host, args.port)
    # SIGINT too: a shell that starts us in the background has it ignored
    previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        print(f"{server.url}  (Ctrl-C ends it)", flush=True)
        if not server.is_local:
            print(
                f"warning: whoever reaches this machine at port {server.server_port} can use the page; it asks for "
                "no password",
                file=sys.stderr,
            )
        if args.open:  # a browser in a terminal would not return before it ends
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        server.serve_forever()
    except KeyboardInterrupt:  # the way to end it
        print("stopped")
    finally:
        server.server_close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
