"""Where bytes lie: folders and object stores.

* `files`: byte ranges of local files: the seam between checkpoints and storage
* `open_files`: the files of a folder, wherever it is
* `joined_files`: several folders as one
* `tree`: all files below a folder
* `remote`: that seam over a store
* `io_pool`: the threads that wait for stores, ended before a fork
* `prefetch`: ranges that will be read, asked for before
* `object_store`: one folder of an object store, its requests and their retries
* `drivers`: what a store is asked, and how fsspec answers
* `s3`: how botocore does
* `multipart`: a file of an S3 store, several parts of it on their way at once
* `crc`: checksums of bytes, and of joined parts without touching them
"""
