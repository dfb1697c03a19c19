// SPDX-License-Identifier: GPL-2.0
/*
 * The device, and what is asked of it: requests are decoded here, and nothing
 * else is done.
 */
#include <linux/anon_inodes.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <asm/cpufeature.h>
#include <asm/smp.h>
#include <asm/tsc.h>

#include "vm.h"

/* What a claim's descriptor stands for. */
struct claim {
	struct cpumask cpus;
};

static int claim_release(struct inode *inode, struct file *file)
{
	struct claim *claim = file->private_data;

	basalt_release_cpus(&claim->cpus);
	kfree(claim);
	return 0;
}

static long get_info(struct basalt_info __user *user)
{
	struct basalt_info info = {
		.version = BASALT_API_VERSION,
		.vendor = boot_cpu_has(X86_FEATURE_SVM) ? BASALT_VENDOR_AMD : BASALT_VENDOR_NONE,
		.tsc_khz = tsc_khz,
	};

	basalt_pool_tell(&info.memory, &info.memory_free);
	return copy_to_user(user, &info, sizeof(info)) ? -EFAULT : 0;
}

static long get_claimed(const struct claim *claim, struct basalt_claimed __user *user)
{
	struct basalt_claimed *claimed;
	unsigned int cpu;
	long error = 0;

	claimed = kzalloc(sizeof(*claimed), GFP_KERNEL);
	if (!claimed)
		return -ENOMEM;
	for_each_cpu(cpu, &claim->cpus)
		claimed->cpus[claimed->count++] = cpu;
	claimed->tsc_khz = tsc_khz;
	if (copy_to_user(user, claimed, sizeof(*claimed)))
		error = -EFAULT;
	kfree(claimed);
	return error;
}

static long claim_ioctl(struct file *file, unsigned int request, unsigned long argument)
{
	switch (request) {
	case BASALT_GET_INFO:
		return get_info((void __user *)argument);
	case BASALT_GET_CLAIMED:
		return get_claimed(file->private_data, (void __user *)argument);
	case BASALT_CREATE_VM:
		return basalt_vm_create(file, (void __user *)argument);
	default:
		return -ENOTTY;
	}
}

static const struct file_operations claim_operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = claim_ioctl,
	.release = claim_release,
	.llseek = noop_llseek,
};

/**
 * basalt_claim_has() - whether a CPU is one of a claim
 * @file: the claim's
 * @cpu: the CPU's number
 *
 * Return: that.
 */
bool basalt_claim_has(struct file *file, unsigned int cpu)
{
	struct claim *claim = file->private_data;

	return cpu < nr_cpu_ids && cpumask_test_cpu(cpu, &claim->cpus);
}

static int decode_claim(struct basalt_claim *asked, struct cpumask *cpus)
{
	unsigned int index;

	if (asked->flags || asked->failed || memchr_inv(asked->reserved, 0, sizeof(asked->reserved)))
		return -EINVAL;
	if (!asked->count || asked->count > BASALT_MAX_CPUS)
		return -EINVAL;
	for (index = 0; index < asked->count; index++) {
		if (asked->cpus[index] >= nr_cpu_ids) {
			asked->failed = asked->cpus[index];
			return -ENODEV;
		}
		if (cpumask_test_and_set_cpu(asked->cpus[index], cpus))
			return -EINVAL;
	}
	return 0;
}

static long do_claim(struct basalt_claim __user *user)
{
	struct basalt_claim asked;
	struct claim *claim;
	int error, fd;

	if (copy_from_user(&asked, user, sizeof(asked)))
		return -EFAULT;
	claim = kzalloc(sizeof(*claim), GFP_KERNEL_ACCOUNT);
	if (!claim)
		return -ENOMEM;
	error = decode_claim(&asked, &claim->cpus);
	if (!error)
		error = basalt_claim_cpus(&claim->cpus, &asked.failed);
	if (error) {
		if (put_user(asked.failed, &user->failed))
			error = -EFAULT;
		goto free;
	}
	fd = anon_inode_getfd("basalt-claim", &claim_operations, claim, O_RDWR | O_CLOEXEC);
	if (fd >= 0)
		return fd;
	error = fd;
	basalt_release_cpus(&claim->cpus);
free:
	kfree(claim);
	return error;
}

static long basalt_ioctl(struct file *file, unsigned int request, unsigned long argument)
{
	void __user *user = (void __user *)argument;

	switch (request) {
	case BASALT_GET_INFO:
		return get_info(user);
	case BASALT_CLAIM:
		return do_claim(user);
	default:
		return -ENOTTY;
	}
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = basalt_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "basalt",
	.fops = &operations,
	.mode = 0600,
};

static int __init basalt_init(void)
{
	int error;

	error = basalt_pool_init();
	if (error)
		return error;
	error = basalt_wake_init();
	if (error)
		goto pool;
	error = basalt_claims_init();
	if (error)
		goto wake;
	error = basalt_notifiers_register();
	if (error)
		goto claims;
	error = misc_register(&device);
	if (error)
		goto notifiers;
	return 0;
notifiers:
	basalt_notifiers_unregister();
claims:
	basalt_claims_exit();
wake:
	basalt_wake_exit();
pool:
	basalt_pool_exit();
	return error;
}

static void __exit basalt_exit(void)
{
	misc_deregister(&device);
	basalt_routes_exit();
	basalt_notifiers_unregister();
	basalt_claims_exit();
	basalt_wake_exit();
	basalt_pool_exit();
}

module_init(basalt_init);
module_exit(basalt_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("CPUs that Linux gives up, and virtual machines that run on them");
