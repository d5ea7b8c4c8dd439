"""Which bytes go where: target x boxes x chunks. Nothing is read and nothing is written here.

* `build`: makes the plan
* `digest`: what tells two plans apart
* `overlap`: which pieces of which chunks make up a box, and the proof that they tile it
* `strategy`: how each piece gets there: copied, or computed
* `tiling`: finding boxes among many, in near linear time
* `byte_runs`: how a strided region is read: in which pieces, with how much waste
* `coalesce`: which small items make one write, and which one read
* `holes`: where files hold zeros alone
* `assign`: which worker carries out which items
* `weight_files`: the plan of safetensors files
* `raw_files`: the plan of a copy
"""
