//! In a guest with Python: an interface of a name, the first argument, gets an address, the second, and is up. What a script begins with
//! that then does something over it.

pub(super) const UP: &str = "
import fcntl, socket, struct, sys
name, own = sys.argv[1], sys.argv[2]
control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
def address(request, text):
    fcntl.ioctl(control, request, struct.pack('16sH2x4s8x', name.encode(), socket.AF_INET, socket.inet_aton(text)))
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891c
address(SIOCSIFADDR, own)
address(SIOCSIFNETMASK, '255.255.255.0')
IFF_UP, IFF_RUNNING = 1, 0x40
fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack('16sH22x', name.encode(), IFF_UP | IFF_RUNNING))
";
