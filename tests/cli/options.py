"""Every option of every command, frozen: scripts depend on them."""

OPTIONS = {
    "inspect": (
        "--keys --iteration --json --tree --not-ignore-param-to-group-meta --enable-msc --trust-pickle --follow-links"
    ),
    "print-torch-dcp-in-json": (
        "--values -o --output --no-write --enable-msc --trust-pickle --follow-links"
    ),
    "convert": (
        "--to --swiglu --no-swiglu --swiglu-modules --param-to-param-group-map-json --strict-map "
        "--output-optimizer-state-prefix --output-model-weight-prefix --rename-mtp-keys --target --aliases "
        "--layer-spec --experts --weights-only --dtype --vocab-size-padded --vocab-size --extra-state "
        "--stacked --per-layer --hf-config --max-shard-size --layout --world-size --dp-shard --dp-outer --tp "
        "--cp --ep --etp --strategy --outer-strategy --iteration --check-masters --ignore-keys --overwrite "
        "--resume --dry-run --threads --max-memory --fsync --direct --quiet -q --json --report --trust-pickle "
        "--enable-msc --oom-traceback --follow-links"
    ),
    "convert-torch-dist-to-fsdp-dtensor": (
        "--swiglu --no-swiglu --swiglu-modules --param-to-param-group-map-json --strict-map "
        "--output-optimizer-state-prefix --output-model-weight-prefix --rename-mtp-keys --target --aliases "
        "--layer-spec --experts --weights-only --dtype --vocab-size-padded --vocab-size --layout --world-size "
        "--dp-shard --dp-outer --tp --cp --ep --etp --strategy --outer-strategy --iteration --check-masters "
        "--ignore-keys --overwrite --resume --dry-run --threads --max-memory --fsync --direct --quiet -q --json "
        "--report --trust-pickle --enable-msc --oom-traceback --follow-links"
    ),
    "convert-fsdp-dtensor-to-torch-dist": (
        "--layer-spec --weights-only --dtype --extra-state --stacked --per-layer --tp --ep --etp --iteration "
        "--ignore-keys --overwrite --resume --dry-run --threads --max-memory --fsync --direct --quiet -q --json "
        "--report --trust-pickle --enable-msc --oom-traceback --follow-links"
    ),
    "build-param-group-map": (
        "-o --output --explain --target --layer-spec --experts --swiglu --no-swiglu --iteration --enable-msc "
        "--follow-links"
    ),
    "plan": (
        "--rank --tensor --json --svg --html --target --layer-spec --experts --swiglu --no-swiglu "
        "--weights-only --layout --world-size --dp-shard --dp-outer --tp --cp --ep --etp --strategy "
        "--outer-strategy --iteration --ignore-keys --trust-pickle --enable-msc --follow-links"
    ),
    "export-hf": (
        "--hf-config --rules --dtype --vocab-size --max-shard-size --mtp-copies --tp --iteration "
        "--ignore-keys --overwrite --resume --dry-run --threads --max-memory --fsync --direct --quiet -q --json "
        "--report --trust-pickle --enable-msc --follow-links"
    ),
    "import-hf": (
        "--to --rules --dtype --vocab-multiple --target --layer-spec --experts --layout --world-size "
        "--dp-shard --dp-outer --tp --cp --ep --etp --strategy --outer-strategy --iteration --overwrite "
        "--resume --dry-run --threads --max-memory --fsync --direct --quiet -q --json --report --enable-msc "
        "--follow-links"
    ),
    "verify": (
        "--content --manifest --allow-nonfinite --iteration --format --json --junit --threads --quiet -q "
        "--trust-pickle --enable-msc --follow-links"
    ),
    "diff": (
        "--rtol --atol --ulp --nan --keys --ignore --by --target --iteration --json --threads --quiet -q "
        "--enable-msc --trust-pickle --follow-links"
    ),
    "compare-two-checkpoint": (
        "--rtol --atol --ulp --nan --keys --ignore --by --target --iteration --json --threads --quiet -q "
        "--enable-msc --trust-pickle --follow-links"
    ),
    "preflight": (
        "--yaml --iteration --format --json --junit --trust-pickle --enable-msc --follow-links"
    ),
    "modify-state-dict": (
        "--op --iteration --overwrite --json --quiet -q --enable-msc --trust-pickle --follow-links"
    ),
    "slice": (
        "--layers --block --iteration --overwrite --json --quiet -q --trust-pickle --enable-msc --follow-links"
    ),
    "print-tensor": (
        "--slice --stats --iteration --json --trust-pickle --enable-msc --follow-links"
    ),
    "env": (
        "--json"
    ),
}  # fmt: skip
