# Shell functions shared by the image recipes: which Debian mirror this machine uses, how a trimmed Debian tree becomes
# two layers, and how layers become an OCI image layout (sh, coreutils, findutils, tar, gzip and awk; nothing else).
# It deliberately does not know which packages any image has, nor how Basalt stores images. No host name is written here.

RELEASE=bookworm
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH LC_ALL=C DEBIAN_FRONTEND=noninteractive
umask 022

say() { printf '%s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# need PACKAGE COMMAND: installs a Debian package on this machine unless the command is there already.
need() {
    command -v "$2" >/dev/null 2>&1 && return 0
    say "installing $1"
    apt-get install -qq -y --no-install-recommends "$1" >/dev/null 2>&1 && return 0
    apt-get update -qq || die "apt-get update failed: check this machine's apt sources"
    apt-get install -qq -y --no-install-recommends "$1" >/dev/null || die "cannot install $1: see the lines above"
}

# debian_sources RELEASE: one-line apt sources for RELEASE, its updates and its security suite, with the mirrors that
# this machine's own configuration names (one-line *.list and deb822 *.sources files), component main only.
debian_sources() {
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
        [ -r "$file" ] || continue
        case $file in
            *.sources) awk -v release="$1" -v RS= -F '\n' '
                {
                    delete field; key = ""
                    for (i = 1; i <= NF; i++) {
                        if ($i ~ /^#/) continue
                        if ($i ~ /^[ \t]/) { field[key] = field[key] " " $i; continue }
                        colon = index($i, ":")
                        key = tolower(substr($i, 1, colon - 1))
                        field[key] = substr($i, colon + 1)
                    }
                    if (tolower(field["enabled"]) ~ /no/ || (" " field["types"] " ") !~ / deb /) next
                    uris = split(field["uris"], uri, " "); suites = split(field["suites"], suite, " ")
                    signed = field["signed-by"]; gsub(/ /, "", signed)
                    option = signed ~ /^\// ? "[signed-by=" signed "] " : ""
                    for (u = 1; u <= uris; u++) for (s = 1; s <= suites; s++)
                        if (suite[s] ~ "^" release "(-updates|-security|/updates)?$")
                            print "deb " option uri[u] " " suite[s] " main"
                }' "$file" ;;
            *) awk -v release="$1" '
                $1 == "deb" {
                    option = ""; i = 2
                    if ($2 ~ /^\[/) {
                        for (; i <= NF; i++) { option = option $i " "; if ($i ~ /\]$/) break }
                        i++
                    }
                    if ($(i + 1) ~ "^" release "(-updates|-security|/updates)?$")
                        print "deb " option $i " " $(i + 1) " main"
                }' "$file" ;;
        esac
    done | sort -u | awk -v release="$1" '
        # A suite counts once, by the first mirror; the release itself goes first.
        { suite = $(NF - 1) } seen[suite]++ { next } suite == release { print; next } { rest = rest $0 "\n" }
        END { printf "%s", rest }'
}

# trim ROOT: removes what differs between two runs and what no workload reads.
trim() {
    rm -rf "$1"/var/lib/apt/lists "$1"/var/cache/apt "$1"/var/log/* "$1"/var/cache/ldconfig/* \
        "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old "$1"/usr/share/locale/* "$1"/usr/share/doc/* \
        "$1"/usr/share/info/* "$1"/usr/share/lintian "$1"/usr/share/bug "$1"/etc/apt/sources.list \
        "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/hostname "$1"/etc/resolv.conf \
        "$1"/var/tmp/*
    mkdir -p "$1"/var/lib/apt/lists/partial "$1"/var/cache/apt/archives/partial
    : >"$1"/etc/machine-id
    # The day of the last password change is the day of the build: make it that of the archive.
    sed -i "s/^\([^:]*:[^:]*\):[0-9]*:/\1:$(($2 / 86400)):/" "$1"/etc/shadow
    rm -f "$1"/etc/shadow- "$1"/etc/gshadow- "$1"/etc/passwd- "$1"/etc/group-
}

# listing ROOT: one line for each entry with everything that tells a changed file from an unchanged one. Directories on
# which something is mounted for the installation are left out, and not looked into: processes come and go there.
listing() {
    (cd "$1" && find . -mindepth 1 \
        \( -path ./dev -o -path ./proc -o -path ./sys -o -path ./run -o -path ./tmp \) -prune -o \
        -printf '%P\t%y %m %U %G %s %T@ %C@ %l\n' | sort)
}

# mount_points DIR: empty directories in place of those that `listing` leaves out.
mount_points() {
    mkdir -p "$1"
    mkdir -m 755 "$1/dev" "$1/run"
    mkdir -m 555 "$1/proc" "$1/sys"
    mkdir -m 1777 "$1/tmp"
}

# pack ROOT EPOCH NAMES TAR: the entries named in NAMES (NUL-separated) as a tar with stable times and owners.
pack() {
    tar -C "$1" -cf "$4" --format=pax --pax-option=delete=atime,delete=ctime,exthdr.name=%d/PaxHeaders/%f \
        --numeric-owner --xattrs --xattrs-include='*' --mtime="@$2" --clamp-mtime --no-recursion --null -T "$3"
}

# base_hook ROOT WORK PACKAGES...: runs inside mmdebstrap, when the base system is complete. Packs the base as the first
# layer, installs PACKAGES, calls the recipe's `finish ROOT`, and packs what changed, with whiteouts, as the second.
base_hook() {
    root=$1 work=$2; shift 2
    # Among mmdebstrap's own output, which goes to a log, this is for the recipe's: see debian_layers.
    say() { printf 'recipe: %s\n' "$*"; }
    epoch=$(sed -n 's/^Date: //p' "$root"/var/lib/apt/lists/*Release | while read -r date; do date -d "$date" +%s; done |
        sort -n | tail -n 1)
    [ -n "$epoch" ] || die "no Release file under $root/var/lib/apt/lists: cannot date the image"
    printf '%s\n' "$epoch" >"$work/epoch"
    mv "$root/var/lib/apt/lists" "$root/var/cache/apt" "$work"
    trim "$root" "$epoch"
    listing "$root" >"$work/base.listing"
    cut -f 1 "$work/base.listing" | tr '\n' '\0' >"$work/base.names"
    say "packing the base layer"
    mount_points "$work/mounts"
    printf '%s\0' dev proc run sys tmp >"$work/mounts.names"
    pack "$work/mounts" "$epoch" "$work/mounts.names" "$work/base.tar"
    pack "$root" "$epoch" "$work/base.names" "$work/rest.tar"
    tar -Af "$work/base.tar" "$work/rest.tar"
    rm "$work/rest.tar"

    say "installing $*"
    rm -rf "$root/var/lib/apt/lists" "$root/var/cache/apt"
    mv "$work/lists" "$root/var/lib/apt/lists"; mv "$work/apt" "$root/var/cache/apt"
    cp "$work/sources" "$root/etc/apt/sources.list"
    # Without SOURCE_DATE_EPOCH Python's .pyc files carry their source's own time, which is stable and quick to check.
    env -u SOURCE_DATE_EPOCH APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get install -qq -y --no-install-recommends \
        -o DPkg::Chroot-Directory="$root" -o Dpkg::Use-Pty=0 "$@" >"$work/apt.log" 2>&1 ||
        { cat "$work/apt.log" >&2; die "cannot install $*"; }
    finish "$root"
    trim "$root" "$epoch"

    say "packing the application layer"
    listing "$root" >"$work/app.listing"
    comm -13 "$work/base.listing" "$work/app.listing" | cut -f 1 | tr '\n' '\0' >"$work/app.names"
    pack "$root" "$epoch" "$work/app.names" "$work/app.tar"
    cut -f 1 "$work/base.listing" | sort >"$work/base.paths"
    cut -f 1 "$work/app.listing" | sort >"$work/app.paths"
    mkdir "$work/gone"
    # Of a removed directory only the directory itself needs a whiteout.
    comm -23 "$work/base.paths" "$work/app.paths" |
        awk '{ for (p in top) if (index($0, p "/") == 1) next; top[$0]; print }' |
        while IFS= read -r path; do
            case $path in */*) parent=${path%/*} ;; *) parent=. ;; esac
            mkdir -p "$work/gone/$parent"
            : >"$work/gone/$parent/.wh.${path##*/}"
        done
    (cd "$work/gone" && find . -name '.wh.*' -printf '%P\0' | sort -z) >"$work/gone.names"
    if [ -s "$work/gone.names" ]; then
        tar -C "$work/gone" -rf "$work/app.tar" --format=pax --owner=0 --group=0 --numeric-owner \
            --pax-option=delete=atime,delete=ctime --mtime="@$epoch" --no-recursion --null -T "$work/gone.names"
    fi
}

# debian_layers RECIPE WORK PACKAGES...: leaves base.tar, app.tar and epoch in WORK. RECIPE is called again as
# `RECIPE --hook ROOT WORK PACKAGES...` by mmdebstrap and must then call base_hook.
debian_layers() {
    recipe=$1 work=$2; shift 2
    need mmdebstrap mmdebstrap
    debian_sources "$RELEASE" >"$work/sources"
    [ -s "$work/sources" ] || die "no apt source of this machine serves $RELEASE: add one to /etc/apt/sources.list.d"
    say "making the base system from Debian $RELEASE"
    {
        mmdebstrap --mode=root --variant=essential --format=directory --skip=cleanup/apt --quiet \
            --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
            --aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' \
            --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
            --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
            --dpkgopt='path-exclude=/usr/share/lintian/*' --dpkgopt='path-exclude=/usr/share/bug/*' \
            --include=ca-certificates,netbase,passwd \
            --customize-hook="$recipe --hook \"\$1\" '$work' $*" \
            "$RELEASE" "$work/root" "$work/sources" 2>&1 && say 'recipe done'
    } | {
        done=1
        while IFS= read -r line; do
            case $line in
                'recipe: '*) say "${line#recipe: }" ;;
                'recipe done') done=0 ;;
                *) printf '%s\n' "$line" >>"$work/mmdebstrap.log" ;;
            esac
        done
        exit $done
    } || { cat "$work/mmdebstrap.log" >&2; die "mmdebstrap failed: see the lines above"; }
}

# blob OCI FILE: moves FILE into the layout; sets digest (hex) and size.
blob() {
    digest=$(sha256sum "$2" | cut -d ' ' -f 1)
    size=$(wc -c <"$2")
    mv "$2" "$1/blobs/sha256/$digest"
}

# oci_layout OCI NAME EPOCH CONFIG LAYER.tar...: an OCI image layout directory (image-spec 1.0: image-layout, image
# index, manifest, config). CONFIG is the text of the config object's `config` member, without its braces.
oci_layout() {
    oci=$1 name=$2 created=$(date -u -d "@$3" +%Y-%m-%dT%H:%M:%SZ) config=$4; shift 4
    mkdir -p "$oci/blobs/sha256"
    layers= diff_ids= history=
    for layer in "$@"; do
        diff_ids="$diff_ids${diff_ids:+,}\"sha256:$(sha256sum "$layer" | cut -d ' ' -f 1)\""
        history="$history${history:+,}{\"created\":\"$created\",\"created_by\":\"$(basename "$layer" .tar)\"}"
        gzip -n -4 -c "$layer" >"$oci/layer.tmp"
        blob "$oci" "$oci/layer.tmp"
        layers="$layers${layers:+,}{\"mediaType\":\"application/vnd.oci.image.layer.v1.tar+gzip\","
        layers="$layers\"digest\":\"sha256:$digest\",\"size\":$size}"
    done
    printf '{"created":"%s","architecture":"amd64","os":"linux","config":{%s},' "$created" "$config" >"$oci/json.tmp"
    printf '"rootfs":{"type":"layers","diff_ids":[%s]},"history":[%s]}' "$diff_ids" "$history" >>"$oci/json.tmp"
    blob "$oci" "$oci/json.tmp"
    printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":' >"$oci/json.tmp"
    printf '{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:%s","size":%s},"layers":[%s]}' \
        "$digest" "$size" "$layers" >>"$oci/json.tmp"
    blob "$oci" "$oci/json.tmp"
    printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[' >"$oci/index.json"
    printf '{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:%s","size":%s,' \
        "$digest" "$size" >>"$oci/index.json"
    printf '"platform":{"architecture":"amd64","os":"linux"},"annotations":{"org.opencontainers.image.ref.name":"%s"}}]}' \
        "$name" >>"$oci/index.json"
    printf '{"imageLayoutVersion":"1.0.0"}' >"$oci/oci-layout"
}

# recipe_main RECIPE NAME CONFIG PACKAGES -- ARGS...: what every recipe does with its arguments.
recipe_main() {
    recipe=$(readlink -f "$1") name=$2 config=$3 packages=$4; shift 5
    if [ "${1-}" = --hook ]; then
        shift
        base_hook "$@"
        return
    fi
    [ $# -eq 1 ] || die "usage: recipe.sh OUT_DIR"
    [ "$(id -u)" -eq 0 ] || die "an image recipe must run as root: it makes a Debian tree with its owners and modes"
    mkdir -p "$1"
    out=$(readlink -f "$1")
    work=$out/work
    rm -rf "$work" "$out/oci"
    mkdir "$work"
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    # shellcheck disable=SC2086 # a list of package names
    debian_layers "$recipe" "$work" $packages
    say "writing the OCI image layout"
    oci_layout "$out/oci" "$name" "$(cat "$work/epoch")" "$config" "$work/base.tar" "$work/app.tar"
    say "done: $name, $(du -sm "$out/oci" | cut -f 1) MB compressed"
}
