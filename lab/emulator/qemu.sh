# What the recipes of emulators have in common. Whoever reads this has `recipe`, what it is called, `out`, `suite`, the Debian release whose
# backports have the QEMU that it wants, `lowest`, the version that it must be at least, and `mends`, which of the faults below it has.

packages_of "$out" "$suite" "$suite-backports"
say "downloading QEMU and its libraries (about 40 MB)"
apt-get install -qq --yes --download-only --no-install-recommends --target-release "$suite-backports" qemu-system-x86 >/dev/null
unset APT_CONFIG

set -- "$work"/cache/archives/*.deb
[ -e "$1" ] || fail "apt downloaded no package"
say "unpacking $# packages"
mkdir "$out/root"
for deb in "$@"; do
    # Packages of programs that only post-install scripts would call are of no use to an unpacked tree.
    case ${deb##*/} in
    adduser_* | passwd_* | debconf_* | libpam*) continue ;;
    esac
    dpkg-deb --extract "$deb" "$out/root"
done
# From trixie on, packages have these directories at their merged places alone.
[ -e "$out/root/lib" ] || ln -s usr/lib "$out/root/lib"
rm -rf "$out/root/usr/share/doc" "$out/root/usr/share/man" "$out/root/usr/share/locale" "$out/root/var" "$out/root/etc"

# Three faults of QEMU (10.0 has all, 11.1 the first two) that kill or stop the lab's guests and the lab itself now and then (docs/lab.md, traps), each
# mended in the program's code, in place. A place is known by its neighbours; in another build they are not found.
#
# injection  VMRUN that injects an interrupt leaves the vector behind as a pending exception (`exception_index` in
#            helper_vmrun). If another thread stops that CPU before the guest's next exit, the guest takes the interrupt
#            twice. The store, six bytes, becomes a no-op; behind it two more fields are stored and the call that delivers
#            interrupts is prepared.
# flags      Whoever restores an x87 state (XRSTOR, FXRSTOR) clears a bit in the first CPU's `hflags2` (cpu_clear_ignne), from
#            any CPU's thread, without a lock: what the first CPU stores there at that moment is undone. Its global interrupt
#            flag is there, and whether it translates by nested pages. The AND gets a lock prefix. The byte for it is taken
#            from the zeroing of %eax behind it, which is hardening and not needed.
# virtual    VMRUN that has a virtual interrupt sets its bit in `interrupt_request` without a lock, and undoes what another
#            thread sets there at that moment. The OR gets a lock prefix, for which it becomes an OR of one byte.
say "mending the code"
perl -e '
    my ($path, %wanted) = (shift, map { $_ => 1 } @ARGV);
    open(my $file, "+<:raw", $path) or die "$path: $!\n";
    my $code = do { local $/; <$file> };
    my @mends = (
        ["injection", qr/\x89[\x80-\xbf]..\xff\xff(?=\xc7[\x80-\xbf].{4}\0{4}\x48\xc7[\x80-\xbf].{4}\xff{4}.{0,16}\xba\x01\0{3})/s,
            sub { "\x66\x0f\x1f\x44\0\0" }],
        ["flags", qr/\x81\xa0..\0\0\x7f\xff{3}\x48\x83\xc4\x08\x31\xc0(?=\x31\xd2)/s,
            sub { "\xf0" . substr($_[0], 0, 14) . "\x90" }],
        ["virtual", qr/(?<=\x85\xf6\x74\x0a)\x81[\x88-\x8b\x8d-\x8f]..\xff\xff\0\x01\0\0/s,
            sub { "\xf0\x80" . substr($_[0], 1, 1) . pack("V", unpack("V", substr($_[0], 2, 4)) + 1) . "\x01\x66\x90" }],
    );
    for (@mends) {
        my ($name, $pattern, $mended) = @$_;
        next unless $wanted{$name};
        my @found;
        push @found, [$-[0], $mended->($&)] while $code =~ /$pattern/g;
        @found == 1 or warn("$name: " . @found . " places match\n"), $failed = 1, next;
        seek($file, $found[0][0], 0) && print($file $found[0][1]) or die "$path: $!\n";
    }
    close($file) or die "$path: $!\n";
    exit($failed);
' "$out/root/usr/bin/qemu-system-x86_64" $mends ||
    say "this build of QEMU is another than the mended one: guests in the lab, and the lab itself, will hang or die now and then"

cat >"$out/qemu-system-x86_64" <<'WRAPPER'
#!/bin/sh
# Runs the private QEMU beside this file with its own loader and libraries. Made by lab/emulator/qemu.sh.
root=$(dirname "$(readlink -f "$0")")/root
lib=x86_64-linux-gnu
export QEMU_MODULE_DIR="$root/usr/lib/$lib/qemu"
exec "$root/lib/$lib/ld-linux-x86-64.so.2" --library-path "$root/lib/$lib:$root/usr/lib/$lib" \
    "$root/usr/bin/qemu-system-x86_64" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" \
    -L "$root/usr/lib/ipxe/qemu" "$@"
WRAPPER
chmod 755 "$out/qemu-system-x86_64"

say "checking that it runs"
version=$("$out/qemu-system-x86_64" --version | sed -n '1s/.*version \([0-9][0-9.]*\).*/\1/p')
[ -n "$version" ] || fail "the unpacked QEMU does not run"
[ "${version%%.*}" -ge "$lowest" ] || fail "got QEMU $version, the lab needs $lowest or later (x2APIC under TCG)"
echo quit | timeout -k 5 30 "$out/qemu-system-x86_64" -M q35 -accel tcg -cpu EPYC-Rome,+svm,+npt,+x2apic,+vgif \
    -nodefaults -display none -serial none -monitor stdio -S >"$work/check" 2>&1 || {
    cat "$work/check" >&2
    fail "QEMU $version starts but cannot build the lab's machine"
}
echo "$version" >"$out/version"
say "QEMU $version, $(du -sm "$out/root" | cut -f1) MB"
