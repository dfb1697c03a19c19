// SPDX-License-Identifier: GPL-2.0
/*
 * A virtio device's doorbell, rung though there is nothing to fetch (the device looks and finds nothing), and a whole round trip: a page
 * read from a disk, with the doorbell, the device's own work, its interrupt, and waking who waits.
 */
#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/gfp.h>
#include <linux/io.h>
#include <linux/pci.h>
#include <linux/virtio_pci.h>
#include <asm/msr.h>

#include "probe.h"

#define VIRTIO_VENDOR	0x1af4
/* The socket device: virtio 1.2, 4.1.2 and 5.10. */
#define VSOCK_DEVICE	(0x1040 + 19)
/* Its queue of what the driver sends. */
#define SEND_QUEUE	1

#define DISK		"/dev/vda"

/* What a device's capability says of where its registers are. */
struct place {
	resource_size_t address;
	u32 length;
	u32 multiplier;
};

static int find(struct pci_dev *device, u8 wanted, struct place *place)
{
	u8 position, type, bar;
	u32 offset;

	for (position = pci_find_capability(device, PCI_CAP_ID_VNDR); position;
	     position = pci_find_next_capability(device, position, PCI_CAP_ID_VNDR)) {
		pci_read_config_byte(device, position + VIRTIO_PCI_CAP_CFG_TYPE, &type);
		if (type != wanted)
			continue;
		pci_read_config_byte(device, position + VIRTIO_PCI_CAP_BAR, &bar);
		if (bar >= PCI_STD_NUM_BARS)
			return -EINVAL;
		pci_read_config_dword(device, position + VIRTIO_PCI_CAP_OFFSET, &offset);
		pci_read_config_dword(device, position + VIRTIO_PCI_CAP_LENGTH, &place->length);
		pci_read_config_dword(device, position + VIRTIO_PCI_NOTIFY_CAP_MULT, &place->multiplier);
		place->address = pci_resource_start(device, bar) + offset;
		return 0;
	}
	return -ENODEV;
}

static void __iomem *doorbell;

/* Where the device wants to be told of its queue. */
static int find_doorbell(struct pci_dev *device)
{
	struct place common, notify;
	void __iomem *registers;
	u16 offset;
	int error;

	error = find(device, VIRTIO_PCI_CAP_COMMON_CFG, &common) ?: find(device, VIRTIO_PCI_CAP_NOTIFY_CFG, &notify);
	if (error)
		return error;
	registers = ioremap(common.address, common.length);
	if (!registers)
		return -ENOMEM;
	/* Its driver selects queues when it starts and when it ends, and it does neither now. */
	iowrite16(SEND_QUEUE, registers + VIRTIO_PCI_COMMON_Q_SELECT);
	offset = ioread16(registers + VIRTIO_PCI_COMMON_Q_NOFF);
	iounmap(registers);
	if ((u64)offset * notify.multiplier + sizeof(u16) > notify.length)
		return -EINVAL;
	doorbell = ioremap(notify.address + (u64)offset * notify.multiplier, sizeof(u16));
	return doorbell ? 0 : -ENOMEM;
}

static int begin_ringing(struct probe *probe)
{
	struct pci_dev *device = pci_get_device(VIRTIO_VENDOR, VSOCK_DEVICE, NULL);
	int error;

	if (!device)
		return -ENODEV;
	error = find_doorbell(device);
	pci_dev_put(device);
	return error;
}

static int ring(struct probe *probe, u64 *ticks)
{
	u64 start = rdtsc_ordered();

	iowrite16(SEND_QUEUE, doorbell);
	*ticks = rdtsc_ordered() - start;
	return 0;
}

static void end_ringing(struct probe *probe)
{
	iounmap(doorbell);
}

static struct block_device *disk;
static struct page *page;

static int begin_reading(struct probe *probe)
{
	page = alloc_page(GFP_KERNEL);
	if (!page)
		return -ENOMEM;
	disk = blkdev_get_by_path(DISK, FMODE_READ, NULL);
	if (IS_ERR(disk)) {
		__free_page(page);
		return PTR_ERR(disk);
	}
	return 0;
}

static int read_page(struct probe *probe, u64 *ticks)
{
	struct bio_vec vector;
	struct bio bio;
	u64 start;
	int error;

	bio_init(&bio, disk, &vector, 1, REQ_OP_READ);
	__bio_add_page(&bio, page, PAGE_SIZE, 0);
	start = rdtsc_ordered();
	error = submit_bio_wait(&bio);
	*ticks = rdtsc_ordered() - start;
	bio_uninit(&bio);
	return error;
}

static void end_reading(struct probe *probe)
{
	blkdev_put(disk, FMODE_READ);
	__free_page(page);
}

const struct operation virtio_operations[] = {
	{ .name = "kick", .begin = begin_ringing, .sample = ring, .end = end_ringing },
	{ .name = "disk-read", .begin = begin_reading, .sample = read_page, .end = end_reading },
	{ }
};
