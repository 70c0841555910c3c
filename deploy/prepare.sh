#!/bin/sh
# What the topology needs before it starts: certificates for every process, and the run's
# specification with the sizes of .env. Runs in a container of its own, whose volume of the
# authority no other container has. Repeating it changes no certificate.
set -eu
umask 077

regions="us eu ap"

if [ ! -e /certs/ca/ca.pem ]; then
    halos certs init /certs/ca
fi

issue() { # ROLE NAME FOLDER
    if [ ! -e "$3/cert.pem" ]; then
        halos certs issue /certs/ca --role "$1" --name "$2" --to "$3"
    fi
}

issue coordinator coordinator /certs/coordinator
issue operator operator /certs/operator
for region in $regions; do
    issue server "$region" "/certs/server/$region"
    for worker in 0 1; do
        issue worker "$region-$worker" "/certs/worker/$region-$worker"
    done
done

# Under another name until it is whole: the coordinator may be reading it.
cat >/config/run.toml.new <<END
[run]
name = "compose"
directory = "/runs/compose"

[model]
preset = "$HALOS_MODEL"

[data]
dataset = "python-stdlib"

[inner]
learning_rate = 3e-3
device = "cpu"

[training]
local_steps_total = $HALOS_STEPS
batch_size = $HALOS_BATCH_SIZE
lease_horizon_s = 10.0

[sync]
local_steps = $HALOS_LOCAL_STEPS
accumulation = $HALOS_ACCUMULATION

[checkpoint]
every_s = 30.0

[evaluation]
every_s = $HALOS_EVALUATE_EVERY_S
batches = 8
END
for region in $regions; do
    cat >>/config/run.toml.new <<END

[[regions]]
name = "$region"
workers = [1.0, 0.5]
END
done
mv /config/run.toml.new /config/run.toml
echo "Prepared: certificates, and a run of $HALOS_STEPS local steps of the model $HALOS_MODEL."
