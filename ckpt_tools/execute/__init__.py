"""Carries out a plan: bounded memory, several workers, all or nothing.

* `run`: the door: who calls what on which rank, in order
* `write_job`: what is written, of what and where; what an output must be able to do
* `local_output`: an output in a directory
* `remote_output`: an output in an object store
* `ranks`: the processes of one conversion, and how they agree
* `workers`: several processes of one machine, forked
* `spread`: one function over many jobs, by threads and workers
* `heartbeat`: signs of life, so that a rank that was killed is missed
* `signals`: Ctrl-C and SIGTERM as a question
* `work`: one rank's threads
* `uploads`: the same into a store, whole files and stretches of long ones
* `buffers`: what one thread may hold in memory
* `marker`: who has a folder of a store
* `stream`: the pump: one item at a time through buffers of fixed size
* `small`: many small items at a time
* `fill`: gathers, casts and computes the elements of a region
* `source_reader`: regions of stored tensors
* `read_box`: any box of a tensor, for checks and printing
* `in_step`: tensors that should be alike, side by side
* `proof`: sums of what is read of a source
* `prove`: what is left of that proof, when all work is done
* `check_masters`: masters round to the stored weights
* `rounding`: the same of two arrays
* `fp8_masters`: the same, unit by unit, for weights that may be FP8
* `fileio`: exact reads and writes of local files
* `folders`: directories held open
* `access`: who may read and write an output
* `vacant`: whether a local output can be taken
* `publish`: an output folder that appears whole or not at all
* `journal`: what is finished, for `--resume`
* `finished`: whether an output that is there is what would be written
* `rehearse`: what writing would refuse, refused at once
* `opened_shards`: safetensors files, opened as everybody will open them
"""
