"""The `sglang` engine: the real `sglang.Engine` in a process of its own, behind the interface of all engines.

engine.py     SGLangEngine, in the replica: states, requests, weight updates
process.py    starts the host process, talks to it, sees it ended
host.py       runs in that process: owns `sglang.Engine`
loader.py     runs in SGLang's schedulers: takes weights over and checks them
arguments.py  from the configuration to SGLang's arguments
versions.py   which versions there are and how they differ
"""
