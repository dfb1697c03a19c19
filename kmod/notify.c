// SPDX-License-Identifier: GPL-2.0
/*
 * What becomes of claimed CPUs when the host ends or sleeps: Linux does not
 * stop them, as it believes them to be dead.
 */
#include <linux/notifier.h>
#include <linux/panic_notifier.h>
#include <linux/printk.h>
#include <linux/reboot.h>
#include <linux/suspend.h>

#include "basalt.h"

static int at_end(struct notifier_block *block, unsigned long action, void *data)
{
	basalt_abandon_cpus();
	return NOTIFY_DONE;
}

/* Reboot, halt, power off, and kexec (reboot(2)). */
static struct notifier_block at_reboot = { .notifier_call = at_end };

static struct notifier_block at_panic = { .notifier_call = at_end };

static int before_sleep(struct notifier_block *block, unsigned long action, void *data)
{
	if (action != PM_SUSPEND_PREPARE && action != PM_HIBERNATION_PREPARE)
		return NOTIFY_DONE;
	if (!basalt_any_claimed())
		return NOTIFY_OK;
	pr_warn(BASALT "the host cannot sleep while CPUs are claimed: end the virtual machines that run on them\n");
	return notifier_from_errno(-EBUSY);
}

static struct notifier_block at_sleep = { .notifier_call = before_sleep };

/**
 * basalt_notifiers_register() - from now on
 *
 * Return: 0, or the first error.
 */
int basalt_notifiers_register(void)
{
	int error;

	error = register_reboot_notifier(&at_reboot);
	if (error)
		return error;
	error = register_pm_notifier(&at_sleep);
	if (error) {
		unregister_reboot_notifier(&at_reboot);
		return error;
	}
	atomic_notifier_chain_register(&panic_notifier_list, &at_panic);
	return 0;
}

/**
 * basalt_notifiers_unregister() - and not any more
 */
void basalt_notifiers_unregister(void)
{
	atomic_notifier_chain_unregister(&panic_notifier_list, &at_panic);
	unregister_pm_notifier(&at_sleep);
	unregister_reboot_notifier(&at_reboot);
}
