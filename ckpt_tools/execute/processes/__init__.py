"""Threads, forked workers and the ranks of a launcher.

* `lines`: connections between processes, and their signs of life
* `meeting`: how the ranks of a launcher find each other
* `ranks`: the processes of one conversion: how they agree, notice who was killed, and stop on signals
* `team`: processes forked on one machine, and one function over many jobs
* `threads`: one rank's threads
"""
