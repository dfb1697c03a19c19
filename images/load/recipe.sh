#!/bin/sh
# recipe.sh OUT_DIR: the image `load` as an OCI image layout in OUT_DIR/oci: what `basalt-bench` has guests do, all of it from Debian's
# packages: redis-server under redis-benchmark, nginx under wrk, stress-ng, a compiler, fio and iperf3.
# It knows its packages and its configuration; everything else is in ../lib.sh.
set -eu
. "$(dirname "$(readlink -f "$0")")/../lib.sh"

# finish ROOT: a page for nginx that is small enough to come in one piece, and an entrypoint by which the image is recognized.
finish() {
    mkdir -p "$1/load"
    head -c 512 /dev/zero | tr '\0' 'x' >"$1/load/page"
    cat >"$1/load/nginx.conf" <<'END'
worker_processes 1;
daemon off;
error_log stderr;
pid /run/nginx.pid;
events { worker_connections 256; }
http {
    access_log off;
    keepalive_requests 100000000;
    server {
        listen 127.0.0.1:8080;
        root /load;
    }
}
END
    # What a compiler is busy with for a moment, on an emulated processor for seconds.
    awk 'BEGIN {
        for (i = 0; i < 3; i++)
            printf "int f%d(int *a, int n) { int s = %d; for (int k = 0; k < n; k++) s += a[k] * (s ^ k); return s; }\n", i, i
    }' >"$1/load/program.c"
    cat >"$1/usr/local/bin/load-entrypoint" <<'END'
#!/bin/sh
exec "$@"
END
    chmod 755 "$1/usr/local/bin/load-entrypoint"
}

CONFIG='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],'
CONFIG=$CONFIG'"Entrypoint":["load-entrypoint"],"Cmd":["sleep","infinity"],"WorkingDir":"/"'
recipe_main "$0" load:latest "$CONFIG" 'redis-server redis-tools nginx-light wrk stress-ng gcc libc6-dev fio iperf3 iproute2' -- "$@"
