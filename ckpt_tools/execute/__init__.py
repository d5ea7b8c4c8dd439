"""Carries out a plan: bounded memory, several workers, all or nothing.

* `output/`: the output's folder or store: locked, resumed, published
* `processes/`: threads, forked workers and the ranks of a launcher
* `proof/`: the source is proven, and masters against weights
* `move/`: bytes from source to output in bounded memory
* `run`: the door: who calls what on which rank, in order
* `write_job`: what is written, of what and where; what an output must be able to do; what a thread may hold
"""
