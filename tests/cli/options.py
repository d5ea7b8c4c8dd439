"""Every option of every command, frozen: scripts depend on them."""

OPTIONS = {
    "inspect": (
        "--keys --by --iteration --json --tree --html --not-ignore-param-to-group-meta --enable-msc --trust-pickle "
        "--follow-links --quiet -q"
    ),
    "print-torch-dcp-in-json": (
        "--values -o --output --no-write --enable-msc --trust-pickle --follow-links --quiet -q"
    ),
    "convert": (
        "--follow-links --check-source "
        "--to --swiglu --no-swiglu --swiglu-modules --param-to-param-group-map-json --strict-map "
        "--output-optimizer-state-prefix --output-model-weight-prefix --rename-mtp-keys --target "
        "--fresh-optimizer --no-fresh-optimizer --lr --min-lr --weight-decay --adam-beta1 --adam-beta2 --adam-eps "
        "--layer-spec --experts --weights-only --dtype --vocab-size-padded --vocab-size "
        "--extra-state --stacked --per-layer --hf-config --max-shard-size --layout "
        "--world-size --gpus --dp-shard --dp-outer "
        "--tp --cp --ep --etp --pp --strategy --outer-strategy --units --iteration --check-masters --ignore-keys "
        "--overwrite --resume --dry-run --workers --threads --max-memory --fsync --direct --quiet -q --json --report "
        "--trust-pickle --enable-msc --oom-traceback"
    ),
    "convert-torch-dist-to-fsdp-dtensor": (
        "--follow-links --check-source "
        "--swiglu --no-swiglu --swiglu-modules --param-to-param-group-map-json --strict-map "
        "--output-optimizer-state-prefix --output-model-weight-prefix --rename-mtp-keys --target "
        "--fresh-optimizer --no-fresh-optimizer --lr --min-lr --weight-decay --adam-beta1 --adam-beta2 --adam-eps "
        "--layer-spec --experts --weights-only --dtype --vocab-size-padded --vocab-size "
        "--layout --world-size "
        "--gpus --dp-shard --dp-outer --tp --cp --ep --etp --pp --strategy --outer-strategy --units --iteration "
        "--check-masters --ignore-keys --overwrite --resume --dry-run --workers --threads --max-memory --fsync "
        "--direct --quiet -q --json --report --trust-pickle --enable-msc --oom-traceback"
    ),
    "convert-fsdp-dtensor-to-torch-dist": (
        "--follow-links "
        "--check-source --target --layer-spec --weights-only --dtype --extra-state --stacked --per-layer "
        "--gpus "
        "--tp --ep --etp --iteration --ignore-keys --overwrite --resume --dry-run --workers --threads --max-memory "
        "--fsync --direct --quiet -q --json --report --trust-pickle --enable-msc --oom-traceback"
    ),
    "build-param-group-map": (
        "-o --output --explain --target --layer-spec --experts --swiglu --no-swiglu --iteration --enable-msc "
        "--follow-links --quiet -q"
    ),
    "ls": (
        "--json --trust-pickle --enable-msc --follow-links --quiet -q"
    ),
    "stats": (
        "--keys --layer --role --by --svg --html --iteration --workers --threads --json --quiet -q --trust-pickle "
        "--enable-msc --follow-links"
    ),
    "plan": (
        "--fresh-optimizer --no-fresh-optimizer --lr --min-lr --weight-decay --adam-beta1 --adam-beta2 --adam-eps "
        "--follow-links "
        "--rank --tensor --json --svg --html --target --layer-spec --experts --swiglu --no-swiglu "
        "--weights-only "
        "--layout --world-size --gpus --dp-shard --dp-outer --tp --cp --ep --etp --pp --strategy "
        "--outer-strategy --units --iteration --ignore-keys --trust-pickle --enable-msc --quiet -q"
    ),
    "export-hf": (
        "--check-source "
        "--hf-config --rules --dtype --vocab-size --max-shard-size --mtp-copies --quantize --tower --peft --alpha "
        "--tp --check-masters --iteration --ignore-keys --overwrite --resume --dry-run --workers --threads "
        "--max-memory --fsync --direct --quiet -q --json --report --trust-pickle --enable-msc --follow-links"
    ),
    "import-hf": (
        "--follow-links --check-source "
        "--fresh-optimizer --no-fresh-optimizer --lr --min-lr --weight-decay --adam-beta1 --adam-beta2 --adam-eps "
        "--to --rules --adapter --tower --dtype --vocab-size-padded --target --layer-spec --experts --layout "
        "--world-size --gpus --dp-shard --dp-outer --tp --cp --ep --etp --pp --strategy --outer-strategy --units "
        "--iteration --overwrite --resume --dry-run --workers --threads --max-memory --fsync --direct --quiet -q "
        "--json --report --enable-msc"
    ),
    "verify": (
        "--follow-links "
        "--content --manifest --write-manifest --allow-nonfinite --iteration --verbose -v "
        "--format --json --junit --workers --threads --quiet -q --trust-pickle --enable-msc"
    ),
    "diff": (
        "--rtol --atol --ulp --nan --keys --ignore --by --headers --rules --target --iteration --json --workers "
        "--threads --quiet -q --enable-msc --trust-pickle --follow-links"
    ),
    "compare-two-checkpoint": (
        "--rtol --atol --ulp --nan --keys --ignore --by --headers --rules --target --iteration --json --workers "
        "--threads --quiet -q --enable-msc --trust-pickle --follow-links"
    ),
    "preflight": (
        "--follow-links --yaml --target --iteration --verbose -v --format --json --junit --trust-pickle --enable-msc "
        "--quiet -q"
    ),
    "modify-state-dict": (
        "--follow-links --check-source "
        "--op --iteration --overwrite --resume --dry-run --workers --threads --max-memory --fsync --direct --json "
        "--report --quiet -q --enable-msc --trust-pickle"
    ),
    "slice": (
        "--follow-links --check-source "
        "--layers --block --iteration --overwrite --resume --dry-run --workers --threads --max-memory --fsync "
        "--direct --json --report --quiet -q --trust-pickle --enable-msc"
    ),
    "copy": (
        "--dry-run --iteration --read-back --check-source --overwrite --resume --workers --threads --max-memory "
        "--fsync --direct --json --quiet -q --trust-pickle --enable-msc --follow-links"
    ),
    "average": (
        "--weights --ema --iteration --check-source --overwrite --resume --dry-run --workers --threads --max-memory "
        "--fsync --direct --json --report --quiet -q --trust-pickle --enable-msc --follow-links"
    ),
    "merge-adapter": (
        "--alpha --iteration --ignore-keys --check-source --overwrite --resume --dry-run --workers --threads "
        "--max-memory --fsync --direct --quiet -q --json --report --trust-pickle --enable-msc --follow-links"
    ),
    "repair": (
        "--dry-run --iteration --check-source --overwrite --resume --workers --threads --max-memory --fsync --direct "
        "--json --report -q --quiet --trust-pickle --enable-msc --follow-links"
    ),
    "strip": (
        "--dtype --fresh-optimizer --no-fresh-optimizer --lr --min-lr --weight-decay --adam-beta1 --adam-beta2 "
        "--adam-eps --iteration --check-masters --check-source --overwrite --resume --dry-run --workers "
        "--threads --max-memory --fsync --direct --json --report --quiet -q --trust-pickle --enable-msc "
        "--follow-links"
    ),
    "print-tensor": (
        "--slice --stats --iteration --json --trust-pickle --enable-msc --follow-links --quiet -q"
    ),
}  # fmt: skip
