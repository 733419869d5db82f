#!/bin/sh
# Train the papers' networks in the background, one process, resumable: tools/train_papers.sh FOLDER [FLMARKET_COMMAND...]
# Checkpoints, curves (CSV) and weights go to FOLDER. It may be stopped (SIGTERM) at any time; the same command goes on.
# All networks advance together, in ever longer turns, so that early on there is something of each.
set -eu
folder=$1
shift
[ $# -gt 0 ] || set -- flmarket
trap 'kill "$child" 2>/dev/null; wait "$child"; exit 143' TERM INT
for hundredths in 2 10 20 40 70 100; do
    for job in dm-regretnet:flm22-iid murba:flm21-low m-regretnet:flm22-iid regretnet:flm22-iid \
        dm-regretnet:flm22-niid murba:flm21-high m-regretnet:flm22-niid regretnet:flm22-niid \
        dm-regretnet-convl:flm22-iid dm-regretnet-convl:flm22-niid \
        murba-10:flm21-low murba-10:flm21-high murba-15:flm21-low murba-15:flm21-high; do
        name=${job%:*} population=${job#*:}
        case $name in murba*) whole=10000 ;; *) whole=5000 ;; esac
        nice -n 15 "$@" train-auction "$name" --preset paper --population "$population" --checkpoints "$folder" \
            --iterations $((whole * hundredths / 100)) --audit-profiles 0 --json \
            --out "$folder/$name-$population.safetensors" >>"$folder/log" 2>&1 &
        child=$!
        wait "$child" || echo "$job ended with $?" >>"$folder/log"
    done
done
