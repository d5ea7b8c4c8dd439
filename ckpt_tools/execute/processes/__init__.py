"""Threads, forked workers and the ranks of a launcher.

* `ranks`: the processes of one conversion, and how they agree
* `workers`: several processes of one machine, forked
* `spread`: one function over many jobs, by threads and workers
* `heartbeat`: signs of life, so that a rank that was killed is missed
* `signals`: Ctrl-C and SIGTERM as a question
* `threads`: one rank's threads
"""
