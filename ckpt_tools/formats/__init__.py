"""Bytes in and out: files, archives, pickles, metadata. What the keys mean is for the next room.

* `tree`: all files below a folder
* `files`: byte ranges of local files: the seam between checkpoints and storage
* `open_files`: the files of a folder, wherever it is
* `joined_files`: several folders as one
* `store`: one folder of an object store, its requests and their retries
* `drivers`: what a store is asked, and how fsspec answers
* `s3`: how botocore does
* `multipart`: a file of an S3 store, several parts of it on their way at once
* `remote`: that seam over a store
* `read_ahead`: ranges that will be read, asked for before
* `requests`: the threads that wait for stores, ended before a fork
* `detect`: which checkpoint a path means, and of which kind
* `metadata_kind`: that kind, by what `.metadata` names
* `run_layouts`: how programs lay out the folders of a run, a row a program
* `beside`: what programs keep beside the tensors that is not read
* `belongs`: which files are part of a checkpoint that this tool writes
* `hub_cache`: the cache of the Hugging Face hub
* `dcp`: `.metadata` of a torch distributed checkpoint as a catalog
* `dcp_storage`: its part that says where items are stored
* `lazy`: entries of it, decoded when they are looked at
* `records`: the flat records that make up most of it, recognised whole
* `dcp_metadata`: `.metadata`, written
* `save_plans`: what every rank wrote, as Megatron keeps it there
* `pickle_machine`: is a pickle safe, and what `.metadata` says, without loading it
* `pickle_values`: what the machine makes of one, and how large that may become
* `pickled_names`: the globals that a pickle may name
* `stored_classes`: the classes that `.metadata` may be made of
* `unpickle`: objects from strangers, read without importing or running anything
* `pickling`: Python values as archives, written without torch
* `pickle_ops`: opcodes of texts and ints, for the two writers
* `storage_classes`: torch's typed storages by element type
* `container`: what one stored item holds: a tensor's frame, or an object
* `archive`: the zip archive of `torch.save`
* `frames`: the archive around one tensor, byte for byte as torch writes it
* `crc`: checksums of bytes, and of joined parts without touching them
* `safetensors`: a Hugging Face folder's tensors as a catalog
* `rank_parts`: that of a folder into which every rank has written its parts
* `documents`: JSON and YAML from strangers, bounded
* `left_out`: keys that a user leaves out
"""
