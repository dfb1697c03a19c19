"""The guest's half of the case `snapshot-volumes`: has files of /x and /data open, and uses them for ever. It begins again by no
path what it has open. What is not as it should be is noted in /errors. Told that it is `alone`, it expects to find in /data/blocks what it
has written there, or something newer."""
import os, socket, struct, sys, time

ALONE = sys.argv[1:] == ["alone"]
# Several of them are not to take the host's processors from those who look at them.
PAUSE = 0.02 if ALONE else 0.2
BLOCK, SLOTS = 16384, 32
WORDS = BLOCK // 8
NOTED = 0


def wrong(what):
    global NOTED
    NOTED += 1
    if NOTED <= 20:
        with open("/errors", "a") as errors:
            errors.write(f"{what}\n")


def life():
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read()


def block(number):
    return struct.pack("<Q", number) * WORDS


# What others write the page cache may not hide.
blocks = os.open("/data/blocks", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
log = os.open("/data/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
held = os.open("/x/held", os.O_RDONLY)
nameless = os.open("/x/nameless", os.O_RDWR | os.O_CREAT)
os.write(nameless, b"mine")
os.unlink("/x/nameless")
listing = os.open("/x/many", os.O_RDONLY)
os.makedirs("/x/deep/er", exist_ok=True)
os.chdir("/x/deep/er")
versions = [0] * SLOTS
number = 0
while True:
    number += 1
    begun = life()
    try:
        slot = number % SLOTS
        os.pwrite(blocks, block(number), slot * BLOCK)
        versions[slot] = number
        # One that was written a while ago: what is there is whole, and no older than it was.
        old = (number * 7 + 1) % SLOTS
        if ALONE and versions[old]:
            found = os.pread(blocks, BLOCK, old * BLOCK)
            first = struct.unpack("<Q", found[:8])[0]
            if found != block(first) or first % SLOTS != old or first < versions[old]:
                wrong(f"slot {old} has {first}, {len(found)} bytes, and {versions[old]} was written")
        if os.pread(held, 100, 0) != b"held":
            wrong(f"what is held says {os.pread(held, 100, 0)}")
        if len(os.listdir(listing)) != 50:
            wrong(f"the directory that is open has {len(os.listdir(listing))} entries")
        me = f"{socket.gethostname()}-{number % 3}"
        try:
            with open(f"new-{me}", "w") as new:
                new.write(me)
            os.rename(f"new-{me}", me)
            with open(me) as back:
                # Who went on beside it may have been ended between making the new one and writing it.
                if back.read() != me and life() == begun:
                    wrong(f"{me} says something else")
            if number % 5 == 0:
                os.unlink(me)
        except OSError:
            # Who went on beside it may have moved it, or put another in its place, if it was kept in between.
            if life() == begun:
                raise
        os.write(log, f"{socket.gethostname()} {number}\n".encode())
    except OSError as error:
        wrong(f"{number}: {error}")
        time.sleep(0.2)
    if os.path.exists("/try"):
        try:
            said = os.pread(nameless, 4, 0).decode()
        except OSError as error:
            said = error.strerror
        with open("/tried.new", "w") as tried:
            tried.write(said)
        os.rename("/tried.new", "/tried")
        os.unlink("/try")
    time.sleep(PAUSE)
