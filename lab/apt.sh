# What recipes have in common that take Debian packages apart and install none. Whoever reads this has `recipe`, what it is called.

say() { printf '%s\n' "$*"; }
fail() { printf '%s recipe: %s\n' "$recipe" "$*" >&2; exit 1; }

[ "$(uname -m)" = x86_64 ] || fail "needs an x86-64 machine, this is $(uname -m)"
command -v apt-get >/dev/null || fail "apt-get is missing; this comes as Debian packages"

# The mirror: every configured source, whatever the file's format, as apt itself understood it.
mirror() {
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' |
        awk -v own="$1" '($2 == own || $3 == own) && $4 == "main" { print $1; exit }'
}

# packages_of OUT_DIR SUITE...: makes OUT_DIR anew, `out`, with a directory for the recipe's own files in it, `work`, which goes with
# the recipe; from then on apt knows these suites of the machine's mirror, and no package as installed, so that it resolves the whole
# closure, from the C library up.
packages_of() {
    out=$1
    shift
    rm -rf "$out"
    mkdir -p "$out"
    out=$(cd "$out" && pwd)
    work=$out/.work
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    own=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    uri=$(mirror "$own")
    if [ -z "$uri" ]; then
        say "package lists are missing: apt-get update"
        apt-get update -qq
        uri=$(mirror "$own")
    fi
    [ -n "$uri" ] || fail "no apt source for the component main of '$own' is configured on this machine"
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    signed=
    [ ! -e "$keyring" ] || signed="[signed-by=$keyring]"
    for listed in "$@"; do
        echo "deb $signed $uri $listed main"
    done >"$work/sources.list"
    : >"$work/status"
    cat >"$work/apt.conf" <<CONF
Dir::Etc::sourcelist "$work/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State::Lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
APT::Sandbox::User "root";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::Languages "none";
Acquire::Retries "3";
CONF
    export APT_CONFIG="$work/apt.conf"
    say "package lists of $*"
    apt-get update -qq
}
