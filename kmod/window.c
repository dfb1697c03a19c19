// SPDX-License-Identifier: GPL-2.0
/*
 * Registers of devices of the host's that a guest reaches itself: pages that
 * user space has mapped of a driver (VFIO), and that are no memory of Linux's.
 *
 * Nobody can hold such pages: the driver takes them away when it likes, as when
 * the device is reset or goes. So whoever takes them from the process, for
 * whatever reason, has them taken from the guest first: its tables do not map
 * them any more, and no CPU that runs it remembers them. What the guest does
 * there afterwards is an exit.
 */
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/overflow.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/delay.h>

#include "compat.h"
#include "vm.h"

/* More than any BAR that is worth it; a window is mapped by pages. */
#define MOST_PAGES	BIT(18)

/* Between one NMI and the next, for a CPU that is to forget. */
#define NMI_AGAIN_US	50

/**
 * struct window - pages of a device
 * @list: in struct basalt_vm
 * @vm: whose
 * @notifier: tells when a page is taken from the process
 * @guest: where the guest sees the first one
 * @address: where the process does
 * @count: of pages
 */
struct window {
	struct list_head list;
	struct basalt_vm *vm;
	struct mmu_interval_notifier notifier;
	u64 guest;
	unsigned long address;
	unsigned long count;
};

/* No CPU that hears remembers anything of the guest's tables when this returns. @vm's lock of mappings is held. */
static void forget(struct basalt_vm *vm)
{
	struct basalt_vcpu *vcpu;

	list_for_each_entry(vcpu, &vm->vcpus, list)
		WRITE_ONCE(vcpu->flush, true);
	/* Whoever is seen not to run looks at that before it does (cmpxchg() in basalt_play_dead()). */
	smp_mb();
	list_for_each_entry(vcpu, &vm->vcpus, list) {
		while (basalt_runs(vcpu) && READ_ONCE(vcpu->flush) && !READ_ONCE(vcpu->lost)) {
			basalt_pull_once(vcpu);
			usleep_range(NMI_AGAIN_US, 2 * NMI_AGAIN_US);
		}
	}
}

static bool taken_away(struct mmu_interval_notifier *notifier, const struct mmu_notifier_range *range,
		       unsigned long seq)
{
	struct window *window = container_of(notifier, struct window, notifier);

	if (!mmu_notifier_range_blockable(range))
		return false;
	mutex_lock(&window->vm->mapping);
	mmu_interval_set_seq(notifier, seq);
	if (basalt_tables_unmap(&window->vm->tables, window->guest, window->count))
		forget(window->vm);
	mutex_unlock(&window->vm->mapping);
	return true;
}

static const struct mmu_interval_notifier_ops notifier_operations = {
	.invalidate = taken_away,
};

/* Which pages these are now. The process's map is locked, and may be unlocked in between. */
static int find_pages(struct window *window, unsigned long *pages)
{
	unsigned long index;

	for (index = 0; index < window->count; index++) {
		unsigned long address = window->address + (index << PAGE_SHIFT);
		bool unlocked;
		int error;

		error = basalt_device_page(current->mm, address, &pages[index]);
		if (!error)
			continue;
		error = fixup_user_fault(current->mm, address, FAULT_FLAG_WRITE, &unlocked);
		if (!error)
			error = basalt_device_page(current->mm, address, &pages[index]);
		if (error)
			return error;
	}
	return 0;
}

static int map(struct window *window)
{
	struct basalt_vm *vm = window->vm;
	unsigned long *pages, seq;
	int error;

	/* All tables first: under the lock of mappings nothing can be allocated, as that may take pages away. */
	error = basalt_tables_prepare(&vm->tables, window->guest, window->count);
	if (error)
		return error;
	pages = kvcalloc(window->count, sizeof(*pages), GFP_KERNEL_ACCOUNT);
	if (!pages)
		return -ENOMEM;
	for (;;) {
		seq = mmu_interval_read_begin(&window->notifier);
		mmap_read_lock(current->mm);
		error = find_pages(window, pages);
		mmap_read_unlock(current->mm);
		if (error)
			break;
		mutex_lock(&vm->mapping);
		if (!mmu_interval_read_retry(&window->notifier, seq)) {
			basalt_tables_map_device(&vm->tables, window->guest, pages, window->count);
			mutex_unlock(&vm->mapping);
			break;
		}
		mutex_unlock(&vm->mapping);
		if (fatal_signal_pending(current)) {
			error = -EINTR;
			break;
		}
	}
	kvfree(pages);
	return error;
}

/* Its guest does not reach it any more when this returns. */
static void close_window(struct window *window)
{
	struct basalt_vm *vm = window->vm;

	mutex_lock(&vm->mapping);
	if (basalt_tables_unmap(&vm->tables, window->guest, window->count))
		forget(vm);
	mutex_unlock(&vm->mapping);
	mmu_interval_notifier_remove(&window->notifier);
	list_del(&window->list);
	kfree(window);
}

static long open_window(struct basalt_vm *vm, const struct basalt_memory *asked)
{
	struct window *window;
	int error;

	window = kzalloc(sizeof(*window), GFP_KERNEL_ACCOUNT);
	if (!window)
		return -ENOMEM;
	window->vm = vm;
	window->guest = asked->guest;
	window->address = asked->address;
	window->count = asked->size >> PAGE_SHIFT;
	error = mmu_interval_notifier_insert(&window->notifier, current->mm, asked->address, asked->size,
					     &notifier_operations);
	if (error) {
		kfree(window);
		return error;
	}
	list_add(&window->list, &vm->windows);
	error = map(window);
	if (error)
		close_window(window);
	return error;
}

static struct window *find(struct basalt_vm *vm, u64 guest, u64 size)
{
	struct window *window;

	list_for_each_entry(window, &vm->windows, list) {
		if (guest < window->guest + (window->count << PAGE_SHIFT) && window->guest < guest + size)
			return window;
	}
	return NULL;
}

/**
 * basalt_window_at() - whether a guest has registers of a device somewhere
 * @vm: which; its lock is held
 * @asked: where
 *
 * Return: that.
 */
bool basalt_window_at(struct basalt_vm *vm, const struct basalt_memory *asked)
{
	return find(vm, asked->guest, asked->size);
}

/**
 * basalt_window_map() - has a guest reach a device's registers
 * @vm: which; its lock is held
 * @asked: where: nothing is there; its addresses and size are pages'
 *
 * Return: 0 or an error of BASALT_MAP_DEVICE.
 */
long basalt_window_map(struct basalt_vm *vm, const struct basalt_memory *asked)
{
	if (asked->flags || asked->size >> PAGE_SHIFT > MOST_PAGES)
		return -EINVAL;
	return open_window(vm, asked);
}

/**
 * basalt_window_unmap() - and not any more
 * @vm: which; its lock is held
 * @asked: as it was mapped
 *
 * Return: 0 or an error of BASALT_UNMAP_DEVICE.
 */
long basalt_window_unmap(struct basalt_vm *vm, const struct basalt_memory *asked)
{
	struct window *window = find(vm, asked->guest, asked->size);

	if (!window || window->guest != asked->guest || window->count != asked->size >> PAGE_SHIFT)
		return -ENOENT;
	close_window(window);
	return 0;
}

/**
 * basalt_windows_free() - with the machine
 * @vm: which; it has no vCPUs any more
 */
void basalt_windows_free(struct basalt_vm *vm)
{
	struct window *window, *next;

	list_for_each_entry_safe(window, next, &vm->windows, list)
		close_window(window);
}
