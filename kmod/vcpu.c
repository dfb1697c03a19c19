// SPDX-License-Identifier: GPL-2.0
/* A vCPU, as user space has it: its page, its state, and its runs. */
#include <linux/anon_inodes.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <asm/smp.h>

#include "compat.h"
#include "vm.h"

/**
 * basalt_new_context() - for a CPU to write to and read from
 *
 * The XSAVE area at its beginning has to be aligned.
 *
 * Return: zeroes, or NULL.
 */
struct basalt_context *basalt_new_context(void)
{
	BUILD_BUG_ON(offsetof(struct basalt_context, xsave));
	return (void *)__get_free_pages(GFP_KERNEL_ACCOUNT | __GFP_ZERO, get_order(sizeof(struct basalt_context)));
}

/**
 * basalt_free_context() - gives one back
 * @context: which, if any; no CPU uses it any more
 */
void basalt_free_context(struct basalt_context *context)
{
	free_pages((unsigned long)context, get_order(sizeof(*context)));
}

static void free_vcpu(struct basalt_vcpu *vcpu)
{
	basalt_free_context(vcpu->aside);
	free_page((unsigned long)vcpu->vmcb);
	free_page((unsigned long)vcpu->host);
	free_page((unsigned long)vcpu->save);
	free_page((unsigned long)vcpu->run);
	kfree(vcpu);
}

/* From now on others of the guest reach it, or do not any more. */
static int set_reachable(struct basalt_vcpu *vcpu, bool reachable)
{
	u32 from = reachable ? BASALT_NO_APIC : vcpu->apic_id, to = reachable ? vcpu->apic_id : BASALT_NO_APIC;
	unsigned int index;

	for (index = 0; index < BASALT_MAX_CPUS; index++) {
		struct basalt_apic *apic = &vcpu->vm->apics[index];

		if (apic->id == from) {
			WRITE_ONCE(apic->physical, vcpu->physical_id);
			/* Pairs with basalt_icr_write(). */
			smp_store_release(&apic->id, to);
			return 0;
		}
	}
	return -ENOSPC;
}

/**
 * basalt_vcpu_hide() - no other vCPU reaches it any more
 * @vcpu: which; the lock of its machine is held
 */
void basalt_vcpu_hide(struct basalt_vcpu *vcpu)
{
	set_reachable(vcpu, false);
}

static int vcpu_release(struct inode *inode, struct file *file)
{
	struct basalt_vcpu *vcpu = file->private_data;
	struct basalt_vm *vm = vcpu->vm;

	mutex_lock(&vm->lock);
	set_reachable(vcpu, false);
	mutex_unlock(&vm->lock);
	basalt_routes_drop(vcpu);
	basalt_server_end(vcpu);
	mutex_lock(&vm->mapping);
	list_del(&vcpu->list);
	mutex_unlock(&vm->mapping);
	if (!vcpu->lost) {
		if (!vcpu->server)
			basalt_cpu_forget(vcpu);
		basalt_links_drop(vcpu);
		basalt_server_put(vcpu->server);
		free_vcpu(vcpu);
	}
	basalt_vm_put(vm);
	return 0;
}

static int vcpu_mmap(struct file *file, struct vm_area_struct *area)
{
	struct basalt_vcpu *vcpu = file->private_data;

	if (area->vm_pgoff || vma_pages(area) != 1 || !(area->vm_flags & VM_SHARED))
		return -EINVAL;
	return vm_insert_page(area, area->vm_start, virt_to_page(vcpu->run));
}

static long run(struct basalt_vcpu *vcpu)
{
	long result;

	if (mutex_lock_interruptible(&vcpu->lock))
		return -EINTR;
	if (vcpu->server) {
		result = basalt_server_run(vcpu);
		mutex_unlock(&vcpu->lock);
		return result;
	}
	mutex_lock(&vcpu->vm->lock);
	vcpu->vm->ran = true;
	mutex_unlock(&vcpu->vm->lock);
	/* The CPU itself looks at this when it has finished the last exit. */
	WRITE_ONCE(vcpu->stop, READ_ONCE(vcpu->run->immediate_exit));
	vcpu->job = BASALT_JOB_RUN;
	result = basalt_cpu_run(vcpu);
	mutex_unlock(&vcpu->lock);
	return result;
}

/* Takes the lock of a vCPU that does not run, and will not as long as it is held. */
static int hold(struct basalt_vcpu *vcpu)
{
	if (!mutex_trylock(&vcpu->lock))
		return -EBUSY;
	if (!vcpu->server || basalt_server_asks(vcpu))
		return 0;
	mutex_unlock(&vcpu->lock);
	return -EBUSY;
}

static long get_state(struct basalt_vcpu *vcpu, struct basalt_state __user *user)
{
	struct basalt_state *state;
	long error = hold(vcpu);

	if (error)
		return error;
	state = kzalloc(sizeof(*state), GFP_KERNEL);
	if (!state) {
		mutex_unlock(&vcpu->lock);
		return -ENOMEM;
	}
	basalt_svm_get_state(vcpu, state);
	mutex_unlock(&vcpu->lock);
	if (copy_to_user(user, state, sizeof(*state)))
		error = -EFAULT;
	kfree(state);
	return error;
}

static long set_state(struct basalt_vcpu *vcpu, const struct basalt_state __user *user)
{
	struct basalt_state *state;
	long error = 0;

	state = memdup_user(user, sizeof(*state));
	if (IS_ERR(state))
		return PTR_ERR(state);
	if (state->interruptibility & ~BASALT_STATE_ALL || state->reserved0 ||
	    memchr_inv(state->reserved, 0, sizeof(state->reserved)) || !basalt_svm_bears(state))
		error = -EINVAL;
	else
		error = hold(vcpu);
	if (!error) {
		basalt_svm_set_state(vcpu, state);
		mutex_unlock(&vcpu->lock);
	}
	kfree(state);
	return error;
}

/* A CPU that is lost may use it for ever. */
static void free_context(struct basalt_vcpu *vcpu, struct basalt_context *context)
{
	if (!vcpu->lost)
		basalt_free_context(context);
}

/* Has the CPU write the context, or read it. What it does it finishes, whatever signal comes. */
static long work(struct basalt_vcpu *vcpu, enum basalt_job job, struct basalt_context *context)
{
	long error;

	if (!mutex_trylock(&vcpu->lock))
		return -EBUSY;
	if (vcpu->server) {
		mutex_unlock(&vcpu->lock);
		return -EOPNOTSUPP;
	}
	vcpu->job = job;
	vcpu->context = context;
	error = basalt_cpu_run(vcpu);
	vcpu->context = NULL;
	mutex_unlock(&vcpu->lock);
	return error == -EINTR ? 0 : error;
}

static long get_context(struct basalt_vcpu *vcpu, struct basalt_context __user *user)
{
	struct basalt_context *context;
	long error;

	if (vcpu->lost)
		return -EIO;
	context = basalt_new_context();
	if (!context)
		return -ENOMEM;
	error = work(vcpu, BASALT_JOB_SAVE, context);
	if (!error && copy_to_user(user, context, sizeof(*context)))
		error = -EFAULT;
	free_context(vcpu, context);
	return error;
}

static long set_context(struct basalt_vcpu *vcpu, const struct basalt_context __user *user)
{
	struct basalt_context *context;
	long error = -EINVAL;

	if (vcpu->lost)
		return -EIO;
	context = basalt_new_context();
	if (!context)
		return -ENOMEM;
	if (copy_from_user(context, user, sizeof(*context)))
		error = -EFAULT;
	else if (!context->reserved0 && !memchr_inv(context->reserved, 0, sizeof(context->reserved)) &&
		 basalt_fpu_bears(context) && basalt_lapic_bears(context))
		error = work(vcpu, BASALT_JOB_LOAD, context);
	free_context(vcpu, context);
	return error;
}

static long interrupt(struct basalt_vcpu *vcpu, const struct basalt_interrupt __user *user)
{
	struct basalt_interrupt asked;

	if (copy_from_user(&asked, user, sizeof(asked)))
		return -EFAULT;
	if (asked.vector < 32 || asked.vector > 255 || memchr_inv(asked.reserved, 0, sizeof(asked.reserved)))
		return -EINVAL;
	spin_lock(&vcpu->sending);
	if (!vcpu->server)
		basalt_send_fixed(vcpu->cpu, asked.vector);
	spin_unlock(&vcpu->sending);
	return vcpu->server ? -EOPNOTSUPP : 0;
}

static long nmi(struct basalt_vcpu *vcpu)
{
	WRITE_ONCE(vcpu->nmi, true);
	/* One that runs looks when it comes out, one that does not when it runs next. */
	spin_lock(&vcpu->sending);
	if (!vcpu->server)
		basalt_send_nmi(vcpu->cpu);
	spin_unlock(&vcpu->sending);
	return vcpu->server ? -EOPNOTSUPP : 0;
}

static long vcpu_ioctl(struct file *file, unsigned int request, unsigned long argument)
{
	struct basalt_vcpu *vcpu = file->private_data;
	void __user *user = (void __user *)argument;

	switch (request) {
	case BASALT_RUN:
		return argument ? -EINVAL : run(vcpu);
	case BASALT_GET_STATE:
		return get_state(vcpu, user);
	case BASALT_SET_STATE:
		return set_state(vcpu, user);
	case BASALT_GET_CONTEXT:
		return get_context(vcpu, user);
	case BASALT_SET_CONTEXT:
		return set_context(vcpu, user);
	case BASALT_INTERRUPT:
		return interrupt(vcpu, user);
	case BASALT_NMI:
		return argument ? -EINVAL : nmi(vcpu);
	case BASALT_ATTACH_IRQ:
		return basalt_route_attach(vcpu, user);
	case BASALT_DETACH_IRQ:
		return basalt_route_detach(vcpu, user);
	case BASALT_FREEZE:
		return basalt_freeze(vcpu, user);
	case BASALT_LINK:
		return basalt_link(vcpu, user);
	default:
		return -ENOTTY;
	}
}

static const struct file_operations vcpu_operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = vcpu_ioctl,
	.mmap = vcpu_mmap,
	.release = vcpu_release,
	.llseek = noop_llseek,
};

static struct basalt_vcpu *new_vcpu(struct basalt_vm *vm, unsigned int cpu, u32 apic_id)
{
	struct basalt_vcpu *vcpu;

	BUILD_BUG_ON(sizeof(struct basalt_run) > PAGE_SIZE);
	vcpu = kzalloc(sizeof(*vcpu), GFP_KERNEL_ACCOUNT);
	if (!vcpu)
		return NULL;
	vcpu->vm = vm;
	vcpu->cpu = cpu;
	vcpu->apic_id = apic_id;
	vcpu->physical_id = cpu_physical_id(cpu);
	mutex_init(&vcpu->lock);
	spin_lock_init(&vcpu->sending);
	vcpu->vmcb = (void *)get_zeroed_page(GFP_KERNEL_ACCOUNT);
	vcpu->host = (void *)get_zeroed_page(GFP_KERNEL_ACCOUNT);
	vcpu->save = (void *)get_zeroed_page(GFP_KERNEL_ACCOUNT);
	vcpu->run = (void *)get_zeroed_page(GFP_KERNEL_ACCOUNT);
	if (vcpu->vmcb && vcpu->host && vcpu->save && vcpu->run) {
		basalt_svm_init_vcpu(vcpu);
		return vcpu;
	}
	free_vcpu(vcpu);
	return NULL;
}

static bool is_taken(const struct basalt_vm *vm, u32 apic_id)
{
	unsigned int index;

	for (index = 0; index < BASALT_MAX_CPUS; index++) {
		if (vm->apics[index].id == apic_id)
			return true;
	}
	return false;
}

/**
 * basalt_vcpu_create() - a vCPU as it is after power on
 * @vm: of which machine
 * @user: where, and by which id
 *
 * Return: its descriptor, or an error of BASALT_CREATE_VCPU.
 */
long basalt_vcpu_create(struct basalt_vm *vm, const struct basalt_create_vcpu __user *user)
{
	struct basalt_create_vcpu asked;
	struct basalt_vcpu *vcpu;
	long result;

	if (copy_from_user(&asked, user, sizeof(asked)))
		return -EFAULT;
	if (asked.apic_id == BASALT_NO_APIC || memchr_inv(asked.reserved, 0, sizeof(asked.reserved)))
		return -EINVAL;
	mutex_lock(&vm->lock);
	if (vm->ran) {
		result = -EBUSY;
	} else if (!basalt_claim_has(vm->claim, asked.cpu)) {
		result = -ENODEV;
	} else if (is_taken(vm, asked.apic_id)) {
		result = -EEXIST;
	} else {
		vcpu = new_vcpu(vm, asked.cpu, asked.apic_id);
		result = vcpu ? basalt_cpu_take(vcpu) : -ENOMEM;
		if (!result) {
			kref_get(&vm->users);
			result = anon_inode_getfd("basalt-vcpu", &vcpu_operations, vcpu, O_RDWR | O_CLOEXEC);
			if (result >= 0) {
				set_reachable(vcpu, true);
				mutex_lock(&vm->mapping);
				list_add(&vcpu->list, &vm->vcpus);
				mutex_unlock(&vm->mapping);
			} else {
				basalt_cpu_forget(vcpu);
				basalt_vm_put(vm);
			}
		}
		if (result < 0 && vcpu)
			free_vcpu(vcpu);
	}
	mutex_unlock(&vm->lock);
	return result;
}
