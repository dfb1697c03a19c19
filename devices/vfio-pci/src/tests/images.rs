//! Configuration spaces of functions as their users know them, and of some that lie. Numbers are those of `lspci -xxxx` of the emulator's
//! devices, and of the devices' manuals. Data only.

use vfio::Irq;
use vfio::fake::FakeDevice;

/// The parts of a configuration space.
pub(super) struct Image(Vec<u8>);

impl Image {
    /// A function with these ids, class and revision, and an interrupt pin.
    pub(super) fn new(size: usize, ids: u32, class: u32) -> Self {
        let mut image = Self(vec![0; size]);
        image.put(0, &ids.to_le_bytes());
        // The host has it on: memory, bus master.
        image.put(4, &[6, 0, 0x10, 0]);
        image.put(8, &class.to_le_bytes());
        image.put(0x3d, &[1]);
        image
    }

    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) -> &mut Self {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// A chain of capabilities: where each is, and its bytes without the link.
    pub(super) fn capabilities(&mut self, list: &[(u8, u8, &[u8])]) -> &mut Self {
        let mut link = 0x34;
        for &(at, id, body) in list {
            self.0[link] = at;
            let at = usize::from(at);
            self.put(at, &[id, 0]);
            self.put(at + 2, body);
            link = at + 1;
        }
        self
    }

    /// The same behind the first 256 bytes, from 0x100 on.
    pub(super) fn extended(&mut self, list: &[(u16, u16, &[u8])]) -> &mut Self {
        for (number, &(at, id, body)) in list.iter().enumerate() {
            let next = list.get(number + 1).map_or(0, |next| next.0);
            let header = u32::from(id) | 1 << 16 | u32::from(next) << 20;
            self.put(at.into(), &header.to_le_bytes());
            self.put(usize::from(at) + 4, body);
        }
        self
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn device(&self) -> FakeDevice {
        FakeDevice::new(&self.0).unwrap()
    }
}

/// PCI Express, version 2: an endpoint with 256 bytes of payload, extended tags and function level reset; the host has error reports
/// on, and the link's registers say something.
const EXPRESS: [u8; 58] = {
    let mut body = [0x5a; 58];
    body[0] = 0x02;
    body[1] = 0;
    let capabilities = 0x1000_8021_u32.to_le_bytes();
    body[2] = capabilities[0];
    body[3] = capabilities[1];
    body[4] = capabilities[2];
    body[5] = capabilities[3];
    // Device control.
    body[6] = 0x2f;
    body[7] = 0x29;
    body
};

const POWER_MANAGEMENT: [u8; 6] = [0x03, 0xfe, 0x00, 0x81, 0x12, 0x34];

/// The emulator's NVMe disk: a BAR of two registers, MSI-X with 65 vectors, PCI Express, power management.
pub(super) fn nvme() -> Image {
    let mut image = Image::new(4096, 0x0010_1b36, 0x0108_0202);
    image.put(0x10, &[4]).put(0x2c, &[0xf4, 0x1a, 0x00, 0x11]);
    image.capabilities(&[
        (0x40, 0x11, &[64, 0, 0, 0x20, 0, 0, 0, 0x30, 0, 0]),
        (0x80, 0x10, &EXPRESS),
        (0x60, 0x01, &POWER_MANAGEMENT),
    ]);
    image.extended(&[
        (0x100, 0x0001, &[0x11; 0x40]),
        (0x148, 0x0003, &[1, 2, 3, 4, 5, 6, 7, 8]),
        (0x160, 0x0010, &[0x22; 0x3c]),
    ]);
    image
}

pub(super) fn nvme_device() -> FakeDevice {
    nvme()
        .device()
        .with_bar(0, 0x4000)
        .with_irqs(Irq::IntX, 1)
        .with_irqs(Irq::MsiX, 65)
}

/// A modern virtio network card: five vendor specific capabilities, MSI-X in a BAR of its own, registers in one that is prefetchable.
pub(super) fn virtio() -> Image {
    let mut image = Image::new(256, 0x1041_1af4, 0x0200_0001);
    image.put(0x14, &[0]).put(0x20, &[0x0c]);
    let at = |kind: u8, length: u8, offset: u8| {
        let mut body = [0; 18];
        body[..3].copy_from_slice(&[length, kind, 4]);
        body[7] = offset;
        body
    };
    image.capabilities(&[
        (0x98, 0x11, &[3, 0, 1, 0, 0, 0, 1, 8, 0, 0]),
        (0x84, 0x09, &at(5, 0x14, 0)),
        (0x70, 0x09, &at(2, 0x14, 0x30)),
        (0x60, 0x09, &at(4, 0x10, 0x20)[..14]),
        (0x50, 0x09, &at(3, 0x10, 0x10)[..14]),
        (0x40, 0x09, &at(1, 0x10, 0x00)[..14]),
    ]);
    image
}

pub(super) fn virtio_device() -> FakeDevice {
    let device = virtio().device().with_bar(1, 0x1000).with_bar(4, 0x4000);
    device.with_irqs(Irq::IntX, 1).with_irqs(Irq::MsiX, 4)
}

/// A virtual function of an 82576: no pin, two BARs of two registers, MSI-X with three vectors, and of extended capabilities errors,
/// routing, a serial number, address translation and access control.
pub(super) fn igbvf() -> Image {
    let mut image = Image::new(4096, 0x10ca_8086, 0x0200_0001);
    image.put(0x3d, &[0]).put(0x10, &[0x0c]).put(0x1c, &[0x0c]);
    image.capabilities(&[(0x70, 0x11, &[2, 0, 3, 0, 0, 0, 3, 0x20, 0, 0]), (0xa0, 0x10, &EXPRESS)]);
    image.extended(&[
        (0x100, 0x0001, &[0x33; 0x40]),
        (0x150, 0x000e, &[0x44; 4]),
        (0x160, 0x0003, &[9, 8, 7, 6, 5, 4, 3, 2]),
        (0x1a0, 0x000f, &[0x55; 4]),
        (0x1d0, 0x000d, &[0x66; 4]),
        // A second number, as nobody has it.
        (0x200, 0x0003, &[0xee; 8]),
    ]);
    image
}

pub(super) fn igbvf_device() -> FakeDevice {
    igbvf()
        .device()
        .with_bar(0, 0x4000)
        .with_bar(3, 0x4000)
        .with_irqs(Irq::MsiX, 3)
}

/// The emulator's `edu`: one vector of MSI with 64 bits, nothing else.
pub(super) fn edu() -> Image {
    let mut image = Image::new(256, 0x11e8_1234, 0x00ff_0010);
    image.capabilities(&[(0x40, 0x05, &[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])]);
    image
}

pub(super) fn edu_device() -> FakeDevice {
    let device = edu().device().with_bar(0, 0x10_0000);
    device.with_irqs(Irq::IntX, 1).with_irqs(Irq::Msi, 1).without_reset()
}

/// Both kinds of messages: eight vectors of MSI with masks, four of MSI-X; a BAR smaller than a page, one of ports, vital product data.
pub(super) fn both() -> Image {
    let mut image = Image::new(256, 0x1234_abcd, 0x0200_0001);
    image.put(0x14, &[1]).put(0x18, &[0]);
    image.capabilities(&[
        (0x50, 0x05, &[0x86, 0x01]),
        (0x70, 0x11, &[3, 0, 0, 0, 0, 0, 0, 0x08, 0, 0]),
        (0x80, 0x03, &[0x77; 6]),
        (0xd0, 0x01, &POWER_MANAGEMENT),
    ]);
    image
}

pub(super) fn both_device() -> FakeDevice {
    let device = both().device().with_bar(0, 0x2000).with_bar(1, 0x20).with_bar(2, 0x100);
    device.with_irqs(Irq::Msi, 8).with_irqs(Irq::MsiX, 4)
}
