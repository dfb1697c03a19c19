#!/bin/sh
# recipe.sh OUT_DIR: the image `redis` (Debian's redis-server and redis-tools) as an OCI image layout in OUT_DIR/oci.
# It knows its packages and its configuration; everything else is in ../lib.sh.
set -eu
. "$(dirname "$(readlink -f "$0")")/../lib.sh"

# finish ROOT: a data directory, and an entrypoint that gives up root when it starts the server.
finish() {
    mkdir -p "$1/data"
    chroot "$1" chown redis:redis /data
    cat >"$1/usr/local/bin/redis-entrypoint" <<'END'
#!/bin/sh
# Starts redis-server with the given options as the user redis; any other command runs as it is.
set -e
case ${1-} in -* | *.conf | '') set -- redis-server "$@" ;; esac
if [ "$1" = redis-server ] && [ "$(id -u)" -eq 0 ]; then
    find . ! -user redis -exec chown redis {} +
    exec setpriv --reuid=redis --regid=redis --init-groups "$@"
fi
exec "$@"
END
    chmod 755 "$1/usr/local/bin/redis-entrypoint"
}

CONFIG='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],'
CONFIG=$CONFIG'"Entrypoint":["redis-entrypoint"],"Cmd":["redis-server"],"WorkingDir":"/data",'
CONFIG=$CONFIG'"ExposedPorts":{"6379/tcp":{}},"Volumes":{"/data":{}},"StopSignal":"SIGTERM"'
recipe_main "$0" redis:latest "$CONFIG" 'redis-server redis-tools' -- "$@"
