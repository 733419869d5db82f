#!/bin/sh
# Train the papers' networks in the background, one process, resumable: tools/train_papers.sh FOLDER [FLMARKET_COMMAND...]
# Checkpoints, curves (CSV) and weights go to FOLDER. It may be stopped (SIGTERM) at any time; the same command goes on.
# Each batch is dealt out in eight parts (an iteration each): SCHEDULE=paper for whole ones, at eight times the cost.
set -eu
folder=$1
shift
[ $# -gt 0 ] || set -- flmarket
jobs=${JOBS:-dm-regretnet:flm22-iid dm-regretnet:flm22-niid murba:flm21-low murba:flm21-high m-regretnet:flm22-iid
    m-regretnet:flm22-niid regretnet:flm22-iid regretnet:flm22-niid dm-regretnet-convl:flm22-iid
    dm-regretnet-convl:flm22-niid murba-10:flm21-low murba-10:flm21-high murba-15:flm21-low murba-15:flm21-high}
mkdir -p "$folder"
trap 'kill "$child" 2>/dev/null; wait "$child"; exit 143' TERM INT
for job in $jobs; do
    name=${job%:*} population=${job#*:}
    [ -f "$folder/$name-$population.safetensors" ] && continue
    nice -n "${NICE:-15}" "$@" train-auction "$name" --preset "${SCHEDULE:-eighths}" --population "$population" \
        --checkpoints "$folder" --audit-profiles 0 --json --out "$folder/$name-$population.safetensors" \
        >>"$folder/log" 2>&1 &
    child=$!
    wait "$child" || echo "$job ended with $?" >>"$folder/log"
done
