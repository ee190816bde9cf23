#!/usr/bin/env python3
"""Programs of several processes on several GPUs: dumped as a group in the middle, killed, restored, compared.

As verify.py, with the programs of programs/group_programs.py, and the same options. Needs at least two GPUs.
`--move` restores rank 0 on the second GPU and rank 1 on the first.
"""

import sys

import verify

GROUP = [sys.executable, str(verify.HERE / "programs" / "group_programs.py")]
# With --twice so many that they last for two dumps.
STEPS = ["--steps", "2500" if "--twice" in sys.argv else "500", "--delay", "0.01"]

verify.PROGRAMS = {
    "ddp": (GROUP + ["ddp"] + STEPS, {}),
    "fsdp": (GROUP + ["fsdp"] + STEPS, {}),
    "tensor": (GROUP + ["tensor-parallel"] + STEPS, {}),
    "shared": (GROUP + ["shared"] + STEPS, {}),
    # The same work of one process, to compare the times with.
    "alone": (verify.TORCH + ["train"] + STEPS, {}),
}

verify.device_map = lambda number: "0=1,1=0"

if __name__ == "__main__":
    sys.exit(verify.main())
