//! What each kind of device is configured with. The devices themselves are elsewhere.

use std::fmt;

use base::ByteSize;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::config::{ConfigError, FdRef};

/// The configuration of one kind of device.
pub trait DeviceConfig: Serialize + DeserializeOwned {
    /// The name of the kind.
    const KIND: &'static str;
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockConfig {
    /// A regular file or block device; opened for writing unless `read_only`.
    pub file: FdRef,
    /// Offer it read-only (`VIRTIO_BLK_F_RO`).
    pub read_only: bool,
    /// Request queues, 1 to 16.
    pub queues: u16,
    /// What the guest reads as serial number, at most 20 bytes (virtio 1.2, 5.2.6).
    pub serial: String,
    /// How requests reach the file.
    #[serde(default)]
    pub engine: BlockEngine,
    /// No limits when left out.
    #[serde(default)]
    pub limits: BlockLimits,
}

/// How much a disk may carry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockLimits {
    /// Reads.
    #[serde(default)]
    pub read: BlockRate,
    /// Writes, and everything else that has work to do: flushes, discards and write-zeroes are operations without bytes.
    #[serde(default)]
    pub write: BlockRate,
}

/// A rate that may be exceeded for a tenth of a second at most; no limit where nothing is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockRate {
    /// Bytes of data.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
    /// Requests.
    #[serde(default)]
    pub operations_per_second: Option<u64>,
}

/// How block requests reach the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockEngine {
    /// io_uring where the host has it, else threads.
    #[default]
    Auto,
    /// io_uring or nothing.
    IoUring,
    /// A pool of threads.
    Threads,
}

impl DeviceConfig for BlockConfig {
    const KIND: &'static str = "block";
}

/// A console port (`hvc0`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConsoleConfig {
    /// What the guest reads; nothing is ever read when not given.
    pub input: Option<FdRef>,
    /// Where the guest's output goes; dropped when not given.
    pub output: Option<FdRef>,
    /// If the output is a regular file, opened for appending: how many of its last bytes are kept. All are when not
    /// given.
    #[serde(default)]
    pub keep: Option<u64>,
}

impl DeviceConfig for ConsoleConfig {
    const KIND: &'static str = "console";
}

/// Sockets between host and guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockConfig {
    /// The guest's context id, 3 or more.
    pub cid: u32,
    /// A listening unix stream socket. Whoever connects sends `CONNECT <port>\n`, is answered `OK <port>\n` once
    /// the guest has accepted, and from then on talks to the guest.
    pub listener: Option<FdRef>,
    /// A SEQPACKET socket to which each connection that the guest opens to CID 2 is handed: one packet, four bytes
    /// of port (little endian) and one descriptor. Guests' connections are refused when not given.
    pub acceptor: Option<FdRef>,
    /// Ports of CID 2 at which the guest reaches a file.
    #[serde(default)]
    pub sinks: Vec<VsockSink>,
}

/// A port whose connections end in a file: what the guest sends is appended, and nothing is ever sent back. When the
/// guest has shut its sending side down and all of it is in the file, the host's side is shut down, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockSink {
    /// The port of CID 2.
    pub port: u32,
    /// A regular file, opened for appending.
    pub file: FdRef,
    /// How many of its last bytes are kept.
    pub keep: u64,
}

impl DeviceConfig for VsockConfig {
    const KIND: &'static str = "vsock";
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// The queues of one TAP, one for each queue pair; opened with `IFF_TAP`, `IFF_NO_PI`, `IFF_VNET_HDR` and, if there
    /// are several, `IFF_MULTI_QUEUE`. None in a rollback: the interface keeps those that the one of its name has.
    pub taps: Vec<FdRef>,
    /// The guest's address.
    pub mac: MacAddress,
    /// The largest packet without its Ethernet header, 1280 to 65535; the TAP's own must not be larger.
    pub mtu: u16,
    /// No limits when left out.
    #[serde(default)]
    pub limits: NetLimits,
}

impl DeviceConfig for NetConfig {
    const KIND: &'static str = "net";
}

/// An Ethernet address; in JSON six bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MacAddress(pub [u8; 6]);

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// How much a network interface may carry, seen from the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetLimits {
    /// To the guest.
    #[serde(default)]
    pub receive: RateLimit,
    /// From the guest.
    #[serde(default)]
    pub transmit: RateLimit,
}

/// A rate that may be exceeded for a tenth of a second at most; no limit where nothing is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimit {
    /// Bytes of Ethernet frames.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
    /// Packets; one that is to be segmented counts as one.
    #[serde(default)]
    pub packets_per_second: Option<u64>,
}

/// A file as memory of the guest's, beside its RAM. The VM is not saved, and has no functions of the host's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PmemConfig {
    /// The file, opened to be read and written: a multiple of 2 MiB, which nobody cuts short while the VM is there.
    pub file: FdRef,
    /// What the guest writes is its own and goes with it; the file stays as it is.
    #[serde(default)]
    pub private: bool,
    /// Parts that are other files', by rising places; at most [`MAX_PMEM_PARTS`], and none of a private one. The VM is not saved then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PmemPartConfig>,
}

/// The most parts of a file as memory that are other files'.
pub const MAX_PMEM_PARTS: usize = 16;

/// A part of a file as memory that is another file's, which may be memory of another VM's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PmemPartConfig {
    /// A memfd that is sealed against shrinking, opened to be read and written.
    pub file: FdRef,
    /// Where in it the part begins, in bytes: whole pages, as all that follows.
    #[serde(default)]
    pub offset: u64,
    /// Where in the memory.
    pub at: u64,
    /// How long it is.
    pub length: u64,
}

impl DeviceConfig for PmemConfig {
    const KIND: &'static str = "pmem";
}

/// A source of entropy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RngConfig {}

impl DeviceConfig for RngConfig {
    const KIND: &'static str = "rng";
}

/// What Linux adds memory by at least on x86-64 (`SECTION_SIZE_BITS`, 27): regions of hot-pluggable memory are multiples of it.
pub const MEM_SECTION: ByteSize = ByteSize::mib(128);

/// The largest region of hot-pluggable memory: with as much memory again that a guest boots with, and the PCI windows above, it stays
/// within the 40 bits of addresses that the least CPU model has.
pub const MEM_MAX_REGION: ByteSize = ByteSize::gib(512);

/// The least block by which memory is plugged: what second-stage page tables map at once.
pub const MEM_MIN_BLOCK: ByteSize = ByteSize::mib(2);

/// Memory that is plugged and unplugged while the guest runs (virtio-mem): a region above all that it boots with, of which nothing is
/// plugged at first. A VM has at most one, and none with [`crate::VmConfig::reservation`]. A guest that does not keep to what it was
/// asked for can touch the whole region: limit the VMM's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemConfig {
    /// The size of the region, which a guest reads once: a multiple of [`MEM_SECTION`], at most [`MEM_MAX_REGION`]. Where it begins
    /// the VMM decides.
    pub region_size: ByteSize,
    /// The most of it that can be plugged, a multiple of [`MEM_SECTION`]; all when not given. Of the rest there are addresses alone, for
    /// which neither host nor guest needs anything. Of a VM that was saved with 0, which had none of it plugged, one with any size can go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_size: Option<ByteSize>,
    /// What the guest is to have plugged from the start on, a multiple of `block_size`. One that is restored is to have what it was asked
    /// for when it was saved.
    #[serde(default)]
    pub requested_size: ByteSize,
    /// By what it is plugged: a power of two, [`MEM_MIN_BLOCK`] to [`MEM_SECTION`].
    #[serde(default = "least_block")]
    pub block_size: ByteSize,
    /// The proximity domain that the guest's ACPI tables put the region into (`VIRTIO_MEM_F_ACPI_PXM`); that of all other memory, 0, and
    /// no word of it to the driver, when not given.
    #[serde(default)]
    pub node_id: Option<u16>,
}

fn least_block() -> ByteSize {
    MEM_MIN_BLOCK
}

impl DeviceConfig for MemConfig {
    const KIND: &'static str = "mem";
}

impl MemConfig {
    /// The most that can be plugged.
    pub fn max_size(&self) -> ByteSize {
        self.max_size.unwrap_or(self.region_size)
    }

    /// Checks the sizes.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn check(&self) -> Result<(), ConfigError> {
        let (region, block, requested) = (self.region_size.0, self.block_size.0, self.requested_size.0);
        if region == 0 || !region.is_multiple_of(MEM_SECTION.0) || region > MEM_MAX_REGION.0 {
            return Err(ConfigError::MemRegion(self.region_size));
        }
        if !block.is_power_of_two() || !(MEM_MIN_BLOCK.0..=MEM_SECTION.0).contains(&block) {
            return Err(ConfigError::MemBlock(self.block_size));
        }
        let max = self.max_size();
        if max > self.region_size || !max.0.is_multiple_of(MEM_SECTION.0) {
            return Err(ConfigError::MemMax {
                max,
                region: self.region_size,
            });
        }
        if requested > max.0 || !requested.is_multiple_of(block) {
            return Err(ConfigError::MemRequested {
                requested: self.requested_size,
                max,
                block: self.block_size,
            });
        }
        Ok(())
    }
}

/// What a balloon counts in (virtio 1.2, 5.5.6): pages of 4 KiB, whatever the guest's are.
pub const BALLOON_PAGE: ByteSize = ByteSize::kib(4);

/// A balloon: the guest gives memory back that it has no use for, by itself or because it is asked to. A VM has at most one. What it gives
/// back is the host's at once, but not while a function of the host's reaches its memory, nor of a guest that owns its CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonConfig {
    /// How much memory the guest is to do without from the start on: a multiple of [`BALLOON_PAGE`], less than its memory. One that is
    /// restored is to do without what it was asked for when it was saved.
    #[serde(default)]
    pub target: ByteSize,
    /// The guest may take memory back before it ends programs for want of it (`VIRTIO_BALLOON_F_DEFLATE_ON_OOM`).
    #[serde(default = "yes")]
    pub deflate_on_oom: bool,
    /// The guest reports what is free in it, by itself (`VIRTIO_BALLOON_F_PAGE_REPORTING`).
    #[serde(default = "yes")]
    pub free_page_reporting: bool,
    /// Functions of the host's come when the target is reached, and reach what is not in the balloon; the target falls to 0 as the rest is mapped
    /// for them. The guest has to tell before it takes a page back (`VIRTIO_BALLOON_F_MUST_TELL_HOST`), and `deflate_on_oom` is not offered, as
    /// that would take back what is not mapped yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dma: Option<BalloonDma>,
}

/// How memory that leaves a balloon is mapped for functions of the host's. Each of these is on but where its gain is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonDma {
    /// Neighbours are mapped by one request.
    #[serde(default = "yes")]
    pub merge: bool,
    /// Memory is mapped before the guest is asked to take it back, and not only when it does.
    #[serde(default = "yes")]
    pub map_ahead: bool,
}

impl Default for BalloonDma {
    fn default() -> Self {
        Self {
            merge: true,
            map_ahead: true,
        }
    }
}

fn yes() -> bool {
    true
}

impl Default for BalloonConfig {
    fn default() -> Self {
        Self {
            target: ByteSize(0),
            deflate_on_oom: true,
            free_page_reporting: true,
            dma: None,
        }
    }
}

impl DeviceConfig for BalloonConfig {
    const KIND: &'static str = "balloon";
}

impl BalloonConfig {
    /// Checks the target against the memory that the guest boots with.
    ///
    /// # Errors
    /// It is no multiple of [`BALLOON_PAGE`], or leaves the guest nothing.
    pub fn check(&self, memory: ByteSize) -> Result<(), ConfigError> {
        let target = self.target;
        match target.0.is_multiple_of(BALLOON_PAGE.0) && target.0 < memory.0 {
            true => Ok(()),
            false => Err(ConfigError::BalloonTarget { target, memory }),
        }
    }
}

/// An IOMMU of the guest's own: functions of the host's stand behind it, and reach of its memory what the guest maps for them. A VM has at most
/// one, from its boot on, and then no device that plugs memory and no [`crate::VmConfig::reservation`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IommuConfig {}

impl DeviceConfig for IommuConfig {
    const KIND: &'static str = "iommu";
}

/// A function of the host's PCI bus, which Linux's VFIO has taken from the host. It comes behind all other devices. With
/// [`crate::VmConfig::reservation`] its interrupts go to the guest's CPUs without the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VfioPciConfig {
    /// Its name on the host, such as `0000:00:04.0`.
    pub name: String,
    /// Its IOMMU group (`/dev/vfio/N`). It is left out where the VM has another function of this group, or the same packet brings one
    /// before: the kernel opens a group once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<FdRef>,
    /// An empty container of VFIO's (`/dev/vfio/vfio`), for the first function of a VM: all of the guest's memory will be mapped there, and
    /// the groups of further functions join it. One that comes with those is closed. Of a VM with an IOMMU of its own ([`IommuConfig`]) each
    /// function has one, and a group that no other has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<FdRef>,
    /// Its own file (`/dev/vfio/devices/vfioN`, Linux 6.6), in place of its group. All functions of a VM come in one of the two ways.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<FdRef>,
    /// iommufd (`/dev/iommu`), for the first function of a VM that comes by its own file, in place of a container; for each, where a container
    /// is for each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iommufd: Option<FdRef>,
    /// How the guest's memory is filled before it is mapped: with the function that brings an address space. A VMM of before does not know it
    /// ([`crate::Functions::memory_fill`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_fill: Option<MemoryFill>,
}

impl DeviceConfig for VfioPciConfig {
    const KIND: &'static str = "vfio-pci";
}

/// The least rate at which memory is filled for functions of the host's, in bytes a second: whoever starts a VM waits for it.
pub const MIN_FILL_RATE: ByteSize = ByteSize::mib(64);

/// How memory is filled (zeroed) before it is mapped for functions of the host's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryFill {
    /// Bytes a second at most, by all threads of the VM that do so; [`MIN_FILL_RATE`] at least. No limit if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<ByteSize>,
    /// The NUMA node of the host that it is to come from, as far as that has some; from where the host likes if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
}

/// How much memory one file of [`crate::Request::AddZeroedMemory`] is: what is mapped for functions of the host's at once.
pub const ZEROED_PIECE: ByteSize = ByteSize::mib(128);

/// A directory that the guest shares with the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FsConfig {
    /// What the guest mounts it by: 1 to 36 bytes (virtio 1.2, 5.11.4).
    pub tag: String,
    /// Where it is served; nowhere yet when not given: the VM can be restored with a directory for it.
    pub source: Option<FsSource>,
}

/// Where a shared directory is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FsSource {
    /// By the VMM.
    Directory(FsDirectory),
    /// At the other end of this stream socket (crate `fuse`, `stream`); its reads and writes should not wait for ever.
    Stream(FdRef),
}

/// A directory that the VMM serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FsDirectory {
    /// The directory, opened with `O_PATH` at least; best the root of a mount of its own, which no path leads out of.
    pub directory: FdRef,
    /// The VMM's `/proc/PID/fd`, by which it opens files that it has found; best the root of a mount of its own, too.
    pub descriptors: FdRef,
    /// The guest can change nothing.
    pub read_only: bool,
    /// Whose the files are that the guest makes.
    pub owners: FsOwners,
    /// How many files the guest may know of at a time, each of which costs a descriptor: 16 at least.
    pub max_files: u32,
}

/// Whose files are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FsOwners {
    /// The guest's users and groups are the directory's, by their numbers. The VMM has the rights for that.
    Kept,
    /// All that the guest makes is the VMM's user's, who is root to the guest; all others are nobody.
    One {
        /// The user.
        uid: u32,
        /// The group.
        gid: u32,
    },
}

impl DeviceConfig for FsConfig {
    const KIND: &'static str = "fs";
}
