"""The commands: which there are, and what each is for."""

from __future__ import annotations

GROUPS: dict[str, dict[str, str]] = {
    "train": {
        "run": "run a training script on several ranks; --auto: one written for one card",
    },
    "before it runs": {
        "plan": "the best way to run a program or a model on so many ranks, and why not the others",
        "estimate": "what a step of an unchanged program takes, run without devices",
        "explain": "every message of a program's step, with the line that needs it; --forbid: a check",
        "simulate": "what a step of a job takes, from a model's sizes and a plan",
        "prove": "whether a program computes on several ranks what it does on one card, and where not",
        "draw": "a program's step, or a pipeline's schedule, as a picture",
    },
    "beside it": {
        "audit": "read another library's configuration: what is wrong with it, what it takes",
        "convert": "checkpoints from and to other formats",
        "doctor": "what this machine can do, what is slow or broken, and the repair",
        "completion": "the words of these commands for your shell's Tab key",
    },
}
"""Each command with what it is for; its module is ``onecard.commands.NAME``, loaded when it is called."""

COMMANDS: dict[str, str] = {name: about for group in GROUPS.values() for name, about in group.items()}
