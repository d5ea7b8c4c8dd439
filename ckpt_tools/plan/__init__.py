"""Which bytes go where: target x boxes x chunks. Nothing is read and nothing is written here.

* `build`: makes the plans, and shares their items among workers
* `links`: the plan with hard links in the place of data files
* `overlap`: which pieces of which chunks make up a box, the proof that they tile it, and how each gets there
* `byte_runs`: how a strided region is read: in which pieces, with how much waste; small items joined
"""
