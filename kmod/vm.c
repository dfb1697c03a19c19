// SPDX-License-Identifier: GPL-2.0
/* A virtual machine: its memory, and what all of its vCPUs have in common. */
#include <linux/anon_inodes.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "compat.h"
#include "vm.h"

/* As much as one call pins. */
#define PIN_AT_ONCE	1024

/**
 * struct region - memory of the guest
 * @list: in struct basalt_vm
 * @guest: where the guest sees it
 * @count: of pages
 * @pages: they, pinned
 * @mm: whose locked memory they count as
 */
struct region {
	struct list_head list;
	u64 guest;
	unsigned long count;
	struct page **pages;
	struct mm_struct *mm;
};

static void free_region(struct region *region, unsigned long pinned)
{
	unpin_user_pages_dirty_lock(region->pages, pinned, true);
	account_locked_vm(region->mm, region->count, false);
	mmdrop(region->mm);
	kvfree(region->pages);
	kfree(region);
}

static int pin(struct region *region, unsigned long address, unsigned long *pinned)
{
	while (*pinned < region->count) {
		unsigned long count = min_t(unsigned long, region->count - *pinned, PIN_AT_ONCE);
		int got;

		got = pin_user_pages_fast(address + (*pinned << PAGE_SHIFT), count, FOLL_WRITE | FOLL_LONGTERM,
					  region->pages + *pinned);
		if (got <= 0)
			return got ? got : -EFAULT;
		*pinned += got;
		if (fatal_signal_pending(current))
			return -EINTR;
	}
	return 0;
}

static bool is_memory(const struct basalt_vm *vm, const struct basalt_memory *asked)
{
	const struct region *other;

	list_for_each_entry(other, &vm->regions, list) {
		if (asked->guest < other->guest + (other->count << PAGE_SHIFT) &&
		    other->guest < asked->guest + asked->size)
			return true;
	}
	return false;
}

static int map_memory(struct basalt_vm *vm, const struct basalt_memory *asked)
{
	struct region *region;
	unsigned long pinned = 0;
	int error;

	region = kzalloc(sizeof(*region), GFP_KERNEL_ACCOUNT);
	if (!region)
		return -ENOMEM;
	region->guest = asked->guest;
	region->count = asked->size >> PAGE_SHIFT;
	region->pages = kvcalloc(region->count, sizeof(*region->pages), GFP_KERNEL_ACCOUNT);
	if (!region->pages) {
		kfree(region);
		return -ENOMEM;
	}
	error = account_locked_vm(current->mm, region->count, true);
	if (error) {
		kvfree(region->pages);
		kfree(region);
		return error;
	}
	region->mm = current->mm;
	mmgrab(region->mm);
	error = pin(region, asked->address, &pinned);
	if (error) {
		free_region(region, pinned);
		return error;
	}
	/* What of it is mapped stays mapped if that fails, and pinned. */
	list_add(&region->list, &vm->regions);
	return basalt_tables_map(&vm->tables, region->guest, region->pages, region->count,
				 !(asked->flags & BASALT_MEMORY_READ_ONLY));
}

/* Memory comes before the guest or when it touches it, and stays; devices' registers come when it has found the device, and may go. */
static long do_map(struct basalt_vm *vm, unsigned int request, const struct basalt_memory *asked)
{
	if (request == BASALT_UNMAP_DEVICE)
		return basalt_window_unmap(vm, asked);
	if (is_memory(vm, asked) || basalt_window_at(vm, asked))
		return -EEXIST;
	return request == BASALT_MAP_DEVICE ? basalt_window_map(vm, asked) : map_memory(vm, asked);
}

static long decode_map(struct basalt_vm *vm, unsigned int request, const struct basalt_memory __user *user)
{
	struct basalt_memory asked;
	long error;
	u64 end;

	if (copy_from_user(&asked, user, sizeof(asked)))
		return -EFAULT;
	if (asked.flags & ~BASALT_MEMORY_READ_ONLY || memchr_inv(asked.reserved, 0, sizeof(asked.reserved)))
		return -EINVAL;
	if (!asked.size || !PAGE_ALIGNED(asked.guest) || !PAGE_ALIGNED(asked.size) || !PAGE_ALIGNED(asked.address))
		return -EINVAL;
	/* There is nothing that would map it. */
	if (vm->identity)
		return -EOPNOTSUPP;
	/* Four levels of tables. */
	if (check_add_overflow(asked.guest, asked.size, &end) || end > BIT_ULL(48))
		return -EINVAL;
	if (mutex_lock_interruptible(&vm->lock))
		return -EINTR;
	error = do_map(vm, request, &asked);
	mutex_unlock(&vm->lock);
	return error;
}

static long set_cpuid(struct basalt_vm *vm, const struct basalt_cpuid __user *user)
{
	struct basalt_cpuid *cpuid;
	long error = 0;

	cpuid = memdup_user(user, sizeof(*cpuid));
	if (IS_ERR(cpuid))
		return PTR_ERR(cpuid);
	if (cpuid->count > BASALT_MAX_CPUID || memchr_inv(cpuid->reserved, 0, sizeof(cpuid->reserved))) {
		kfree(cpuid);
		return -EINVAL;
	}
	mutex_lock(&vm->lock);
	if (vm->ran)
		error = -EBUSY;
	else
		swap(vm->cpuid, cpuid);
	mutex_unlock(&vm->lock);
	kfree(cpuid);
	return error;
}

static long get_place(const struct basalt_vm *vm, struct basalt_place __user *user)
{
	struct basalt_place place = {
		.start = vm->main.start,
		.size = vm->main.size,
		.low_start = vm->low.start,
		.low_size = vm->low.size,
	};

	if (!vm->identity)
		return -EOPNOTSUPP;
	return copy_to_user(user, &place, sizeof(place)) ? -EFAULT : 0;
}

static long vm_ioctl(struct file *file, unsigned int request, unsigned long argument)
{
	struct basalt_vm *vm = file->private_data;
	void __user *user = (void __user *)argument;

	switch (request) {
	case BASALT_MAP_MEMORY:
	case BASALT_MAP_DEVICE:
	case BASALT_UNMAP_DEVICE:
		return decode_map(vm, request, user);
	case BASALT_GET_PLACE:
		return get_place(vm, user);
	case BASALT_CREATE_VCPU:
		return basalt_vcpu_create(vm, user);
	case BASALT_SET_CPUID:
		return set_cpuid(vm, user);
	default:
		return -ENOTTY;
	}
}

/**
 * basalt_vm_leave_claim() - has no CPU any more
 * @vm: which; none of its vCPUs has one
 */
void basalt_vm_leave_claim(struct basalt_vm *vm)
{
	if (vm->claim)
		fput(vm->claim);
	vm->claim = NULL;
}

static void free_vm(struct kref *users)
{
	struct basalt_vm *vm = container_of(users, struct basalt_vm, users);
	struct region *region, *next;

	basalt_windows_free(vm);
	/* Its memory and its tables stay: see lose() in claim.c. Its other CPUs are Linux's again. */
	if (vm->lost) {
		basalt_vm_leave_claim(vm);
		return;
	}
	list_for_each_entry_safe(region, next, &vm->regions, list)
		free_region(region, region->count);
	basalt_pool_give(&vm->main);
	basalt_pool_give(&vm->low);
	basalt_svm_free_vm(vm);
	basalt_tables_free(&vm->tables);
	basalt_vm_leave_claim(vm);
	kfree(vm->cpuid);
	kfree(vm);
}

/**
 * basalt_vm_put() - one user less
 * @vm: of which; with the last one its memory and its claim go
 */
void basalt_vm_put(struct basalt_vm *vm)
{
	kref_put(&vm->users, free_vm);
}

static int vm_release(struct inode *inode, struct file *file)
{
	basalt_vm_put(file->private_data);
	return 0;
}

static bool is_within(const struct basalt_piece *piece, u64 start, u64 size)
{
	return start >= piece->start && size <= piece->size && start - piece->start <= piece->size - size;
}

/* The area keeps the machine's file, and so the machine, whose memory is nobody else's as long as it is mapped. */
static int map_pieces(struct file *file, struct vm_area_struct *area)
{
	const struct basalt_vm *vm = file->private_data;
	u64 start = (u64)area->vm_pgoff << PAGE_SHIFT, size = area->vm_end - area->vm_start;

	if (!vm->identity)
		return -EOPNOTSUPP;
	if (!(area->vm_flags & VM_SHARED) || !(is_within(&vm->main, start, size) || is_within(&vm->low, start, size)))
		return -EINVAL;
	basalt_keep_from_children(area);
	/* Write-back, as the guest and the module have it. */
	return remap_pfn_range(area, area->vm_start, area->vm_pgoff, size, area->vm_page_prot);
}

static const struct file_operations vm_operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = vm_ioctl,
	.mmap = map_pieces,
	.release = vm_release,
	.llseek = noop_llseek,
};

static bool is_valid(const struct basalt_create_vm *asked)
{
	bool identity = asked->flags & BASALT_VM_IDENTITY;

	if (asked->flags & ~BASALT_VM_IDENTITY || asked->reserved0 ||
	    memchr_inv(asked->reserved, 0, sizeof(asked->reserved)))
		return false;
	return identity ? asked->memory && !(asked->memory % BASALT_PIECE) : !asked->memory;
}

/**
 * basalt_vm_create() - a machine without vCPUs; without memory, but for one whose addresses nobody translates
 * @claim: the claim whose CPUs it may have
 * @user: what is asked for
 *
 * Return: its descriptor, or an error of BASALT_CREATE_VM.
 */
long basalt_vm_create(struct file *claim, const struct basalt_create_vm __user *user)
{
	struct basalt_create_vm asked;
	struct basalt_vm *vm;
	long result;

	if (copy_from_user(&asked, user, sizeof(asked)))
		return -EFAULT;
	if (!is_valid(&asked))
		return -EINVAL;
	if (!basalt_svm_usable())
		return -EOPNOTSUPP;
	vm = kzalloc(sizeof(*vm), GFP_KERNEL_ACCOUNT);
	if (!vm)
		return -ENOMEM;
	kref_init(&vm->users);
	mutex_init(&vm->lock);
	mutex_init(&vm->mapping);
	INIT_LIST_HEAD(&vm->regions);
	INIT_LIST_HEAD(&vm->windows);
	INIT_LIST_HEAD(&vm->vcpus);
	memset(vm->apics, 0xff, sizeof(vm->apics));
	vm->claim = get_file(claim);
	vm->identity = asked.flags & BASALT_VM_IDENTITY;
	INIT_LIST_HEAD(&vm->tables.pages);
	result = basalt_tables_init(&vm->tables);
	if (!result)
		result = basalt_svm_init_vm(vm);
	if (!result && vm->identity)
		result = basalt_pool_take(asked.memory, &vm->main, &vm->low);
	if (!result)
		result = anon_inode_getfd("basalt-vm", &vm_operations, vm, O_RDWR | O_CLOEXEC);
	if (result < 0)
		basalt_vm_put(vm);
	return result;
}
