#!/bin/bash
# Add --cluster, the type of device and the image, as for any workload of xpk. xpk restarts on 42 and 127 to 255 by itself.
xpk workload create \
  --workload=my-run \
  --num-slices=4 \
  --max-restarts=10 \
  --restart-on-exit-codes=1,75 \
  --termination-grace-period-seconds=120 \
  --command='hpnlp train --config=lm/bytes '"'"'--workdir=runs/My Run'"'"' '"'"'--data.path=a b'"'"'"'"'"'"'"'"'s.txt'"'"' --train.steps=9 --debug'
