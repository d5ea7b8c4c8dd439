"""The archives of `torch.save`.

* `item_reader`: what one stored item holds: a tensor's frame, or an object
* `zip_archive`: the zip archive of `torch.save`
* `tensor_template`: the archive around one tensor, byte for byte as torch writes it
* `object_writer`: Python values as archives, written without torch
"""
