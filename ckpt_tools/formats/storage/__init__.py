"""Where bytes lie: folders and object stores.

* `files`: byte ranges of local files: the seam between checkpoints and storage
* `open_files`: the files of a folder, wherever it is, and all below it
* `joined_files`: several folders as one
* `remote`: that seam over a store
* `io_pool`: the threads that wait for stores, ended before a fork
* `prefetch`: ranges that will be read, asked for before
* `object_store`: one folder of an object store, its requests and their retries
* `drivers`: what a store is asked, and how fsspec answers
* `s3`: how botocore does
* `crc`: checksums of bytes, and of joined parts without touching them
"""
