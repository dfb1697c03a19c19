// SPDX-License-Identifier: GPL-2.0
/*
 * Interrupts of devices that a guest has been given: each comes as an event of
 * whoever holds the device (VFIO), and goes to a vector of the guest's on the
 * CPU of one of its vCPUs.
 *
 * By way of Linux, which takes the interrupt and signals the event, that is a
 * relay: no exit, but work for a CPU of the host. Where the kernel's IRQ bypass
 * manager says which interrupt the event stands for, the interrupt itself is
 * pointed at the guest's vector, and Linux does not see it any more.
 *
 *            attach               the device's holder has it too
 *  nothing ────────▶ relayed ──────────────────────────────────▶ direct
 *          ◀────────         ◀──────────────────────────────────
 *            detach,              it lets go, or detach
 *            the vCPU goes
 *
 * Whoever of the three goes first, the interrupt is Linux's again before its
 * CPU is: the vCPU holds the CPU, and has let go of its routes before.
 *
 * What this relies on, as read in Linux 6.1 and 6.12 (arch/x86/kernel/apic/
 * vector.c, kernel/irq/msi.c, drivers/iommu/intel/irq_remapping.c, and
 * drivers/iommu/amd/iommu.c): irqd_cfg() is what an interrupt's CPU and vector
 * are, and ops->activate() of the domain above the vectors writes what is
 * there into the entry of the interrupt remapping, or into the device.
 */
#include <linux/eventfd.h>
#include <linux/file.h>
#include <linux/irq.h>
#include <linux/irqbypass.h>
#include <linux/irqdesc.h>
#include <linux/irqdomain.h>
#include <linux/msi.h>
#include <linux/pci.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/workqueue.h>
#include <asm/apic.h>
#include <asm/hw_irq.h>
#include <asm/irqdomain.h>
#include <asm/msi.h>

#include "compat.h"
#include "vm.h"

/* A message without remapping has eight bits for an APIC's id, and these mean all. */
#define MSI_EVERYBODY	0xff

/**
 * struct route - from an event to a vector
 * @list: of all routes
 * @vcpu: whose
 * @vector: the guest's
 * @file: the event's
 * @event: the event
 * @queue: where it says that it was signalled
 * @wait: we, there
 * @table: how we come there
 * @consumer: we, where the IRQ bypass manager looks for who wants the event's interrupt
 * @irq: Linux's number of that, or 0
 * @direct: it is pointed at the vector
 * @fixed: it was already none that Linux moves
 */
struct route {
	struct list_head list;
	struct basalt_vcpu *vcpu;
	u8 vector;
	struct file *file;
	struct eventfd_ctx *event;
	wait_queue_head_t *queue;
	wait_queue_entry_t wait;
	poll_table table;
	struct irq_bypass_consumer consumer;
	unsigned int irq;
	bool direct;
	bool fixed;
};

static LIST_HEAD(routes);

/* For attaching and detaching, each of which is whole. Taken before the bypass manager's, which is taken before the next. */
static DEFINE_MUTEX(changing);

/* For the list, and for where its interrupts point. */
static DEFINE_MUTEX(pointing);

/* Of an interrupt, the level that writes down where it goes: above that of vectors. */
static struct irq_data *writing_level(unsigned int irq)
{
	struct irq_data *data;

	for (data = irq_get_irq_data(irq); data && data->parent_data; data = data->parent_data) {
		if (data->parent_data->domain == x86_vector_domain)
			return data->domain->ops->activate ? data : NULL;
	}
	return NULL;
}

/* Has the entry of the interrupt remapping say so. The descriptor's lock is held, under which Linux changes it as well. */
static bool point_entry(struct irq_data *data, unsigned int cpu, u8 vector)
{
	struct irq_cfg *cfg = irqd_cfg(data), linux_cfg;
	int error;

	/* Entries are logical where Linux's messages are: an x2APIC has its logical id from its own, others what they are told. */
	if (!cfg || (apic->dest_mode_logical && !x2apic_enabled()))
		return false;
	linux_cfg = *cfg;
	cfg->vector = vector;
	cfg->dest_apicid = apic->calc_dest_apicid(cpu);
	error = data->domain->ops->activate(data->domain, data, false);
	*cfg = linux_cfg;
	return !error;
}

/* Has the device's own table say so. */
static bool point_message(struct irq_data *data, unsigned int cpu, u8 vector)
{
	struct msi_desc *desc = irq_data_get_msi_desc(data);
	u32 id = cpu_physical_id(cpu);
	struct msi_msg message = {
		.arch_addr_lo = { .base_address = X86_MSI_BASE_ADDRESS_LOW, .destid_0_7 = id },
		.arch_data = { .vector = vector, .delivery_mode = APIC_DELIVERY_MODE_FIXED },
	};

	/* An entry of the table can be masked while it changes, what there is without a table cannot. */
	if (!desc || !dev_is_pci(desc->dev) || !desc->pci.msi_attrib.is_msix || id >= MSI_EVERYBODY)
		return false;
	pci_write_msi_msg(data->irq, &message);
	return true;
}

static void point(struct route *route)
{
	struct irq_data *data = writing_level(route->irq);
	struct irq_desc *desc;
	unsigned long flags;

	if (!data)
		return;
	desc = irq_data_to_desc(data);
	raw_spin_lock_irqsave(&desc->lock, flags);
	if (irq_domain_is_msi(data->domain))
		route->direct = point_message(data, route->vcpu->cpu, route->vector);
	else
		route->direct = point_entry(data, route->vcpu->cpu, route->vector);
	raw_spin_unlock_irqrestore(&desc->lock, flags);
}

/* Where Linux wants it. */
static void point_back(struct route *route)
{
	struct irq_data *data = writing_level(route->irq);
	struct irq_desc *desc;
	unsigned long flags;

	if (!data || !route->direct)
		return;
	desc = irq_data_to_desc(data);
	raw_spin_lock_irqsave(&desc->lock, flags);
	WARN_ON_ONCE(data->domain->ops->activate(data->domain, data, false));
	raw_spin_unlock_irqrestore(&desc->lock, flags);
	route->direct = false;
}

/* The bypass manager has found the interrupt. What cannot be pointed is relayed. */
static int add_producer(struct irq_bypass_consumer *consumer, struct irq_bypass_producer *producer)
{
	struct route *route = container_of(consumer, struct route, consumer);

	if (producer->irq <= 0)
		return 0;
	mutex_lock(&pointing);
	route->irq = producer->irq;
	/* Nobody moves it by /proc/irq meanwhile. */
	route->fixed = !irqd_can_balance(irq_get_irq_data(route->irq));
	irq_set_status_flags(route->irq, IRQ_NO_BALANCING);
	point(route);
	mutex_unlock(&pointing);
	return 0;
}

/* And its holder frees it next. */
static void del_producer(struct irq_bypass_consumer *consumer, struct irq_bypass_producer *producer)
{
	struct route *route = container_of(consumer, struct route, consumer);

	mutex_lock(&pointing);
	if (route->irq) {
		point_back(route);
		if (!route->fixed)
			irq_clear_status_flags(route->irq, IRQ_NO_BALANCING);
		route->irq = 0;
	}
	mutex_unlock(&pointing);
}

/*
 * Linux has got an interrupt that is pointed elsewhere. Either it was on its
 * way, or Linux has pointed it itself: it moves all interrupts of a CPU that
 * goes offline, whosever they are.
 */
static void point_again(struct work_struct *work)
{
	struct route *route;

	mutex_lock(&pointing);
	list_for_each_entry(route, &routes, list) {
		if (route->direct)
			point(route);
	}
	mutex_unlock(&pointing);
}

static DECLARE_WORK(again, point_again);

/* Maybe in an interrupt, with the queue's lock held. */
static int signalled(wait_queue_entry_t *wait, unsigned int mode, int flags, void *key)
{
	struct route *route = container_of(wait, struct route, wait);
	u64 count;

	if (!(key_to_poll(key) & EPOLLIN))
		return 0;
	eventfd_ctx_do_read(route->event, &count);
	basalt_send_fixed(route->vcpu->cpu, route->vector);
	if (READ_ONCE(route->direct))
		schedule_work(&again);
	return 0;
}

static void enter_queue(struct file *file, wait_queue_head_t *queue, poll_table *table)
{
	struct route *route = container_of(table, struct route, table);

	route->queue = queue;
	add_wait_queue(queue, &route->wait);
}

/* From now on each signal is relayed, and what has come before is now. */
static void listen(struct route *route)
{
	u64 count;

	init_waitqueue_func_entry(&route->wait, signalled);
	init_poll_funcptr(&route->table, enter_queue);
	if (!(vfs_poll(route->file, &route->table) & EPOLLIN))
		return;
	spin_lock_irq(&route->queue->lock);
	eventfd_ctx_do_read(route->event, &count);
	spin_unlock_irq(&route->queue->lock);
	if (count)
		basalt_send_fixed(route->vcpu->cpu, route->vector);
}

static void free_route(struct route *route)
{
	eventfd_ctx_put(route->event);
	fput(route->file);
	kfree(route);
}

/* It is whole before the manager's lock is taken, under which the device's holder may come at once. */
static int begin(struct route *route)
{
	int error;

	listen(route);
	mutex_lock(&pointing);
	list_add(&route->list, &routes);
	mutex_unlock(&pointing);
	route->consumer.token = route->event;
	route->consumer.add_producer = add_producer;
	route->consumer.del_producer = del_producer;
	error = irq_bypass_register_consumer(&route->consumer);
	if (!error)
		return route->direct;
	mutex_lock(&pointing);
	list_del(&route->list);
	mutex_unlock(&pointing);
	remove_wait_queue(route->queue, &route->wait);
	return error;
}

/* Nothing more comes when this returns, but for what the CPU's APIC has got already. */
static void end(struct route *route)
{
	irq_bypass_unregister_consumer(&route->consumer);
	mutex_lock(&pointing);
	list_del(&route->list);
	mutex_unlock(&pointing);
	remove_wait_queue(route->queue, &route->wait);
	free_route(route);
}

static struct route *new_route(struct basalt_vcpu *vcpu, const struct basalt_irq *asked)
{
	struct route *route = kzalloc(sizeof(*route), GFP_KERNEL_ACCOUNT);
	struct file *file;

	if (!route)
		return ERR_PTR(-ENOMEM);
	file = eventfd_fget(asked->event);
	if (IS_ERR(file)) {
		kfree(route);
		return ERR_CAST(file);
	}
	route->file = file;
	route->event = eventfd_ctx_fileget(file);
	route->vcpu = vcpu;
	route->vector = asked->vector;
	return route;
}

static struct route *find(const struct basalt_vcpu *vcpu, const struct eventfd_ctx *event)
{
	struct route *route;

	list_for_each_entry(route, &routes, list) {
		if (route->vcpu == vcpu && (!event || route->event == event))
			return route;
	}
	return NULL;
}

static int decode(struct basalt_irq *asked, const struct basalt_irq __user *user)
{
	if (copy_from_user(asked, user, sizeof(*asked)))
		return -EFAULT;
	return memchr_inv(asked->reserved, 0, sizeof(asked->reserved)) ? -EINVAL : 0;
}

/**
 * basalt_route_attach() - has an event's interrupts go to a vCPU
 * @vcpu: to which
 * @user: what is asked for
 *
 * Return: 1 where they go there without Linux, 0 where they are relayed, or an
 * error of BASALT_ATTACH_IRQ.
 */
long basalt_route_attach(struct basalt_vcpu *vcpu, const struct basalt_irq __user *user)
{
	struct basalt_irq asked;
	struct route *route;
	long result;

	result = decode(&asked, user);
	if (result)
		return result;
	if (asked.vector < 32 || asked.vector > 255)
		return -EINVAL;
	route = new_route(vcpu, &asked);
	if (IS_ERR(route))
		return PTR_ERR(route);
	mutex_lock(&changing);
	/* One that is frozen has no CPU: freeze() in serve.c says so before it has all routes dropped. */
	if (READ_ONCE(vcpu->server))
		result = -EOPNOTSUPP;
	else
		result = find(vcpu, route->event) ? -EEXIST : begin(route);
	mutex_unlock(&changing);
	if (result < 0)
		free_route(route);
	return result;
}

/**
 * basalt_route_detach() - has them go where they came from
 * @vcpu: from which
 * @user: what is asked for
 *
 * Return: 0, or an error of BASALT_DETACH_IRQ.
 */
long basalt_route_detach(struct basalt_vcpu *vcpu, const struct basalt_irq __user *user)
{
	struct basalt_irq asked;
	struct eventfd_ctx *event;
	struct route *route;
	long error;

	error = decode(&asked, user);
	if (error)
		return error;
	if (asked.vector)
		return -EINVAL;
	event = eventfd_ctx_fdget(asked.event);
	if (IS_ERR(event))
		return PTR_ERR(event);
	mutex_lock(&changing);
	route = find(vcpu, event);
	if (route)
		end(route);
	else
		error = -ENOENT;
	mutex_unlock(&changing);
	eventfd_ctx_put(event);
	return error;
}

/**
 * basalt_routes_drop() - no interrupt of a device goes to a vCPU any more
 * @vcpu: to which; its CPU is still its own
 */
void basalt_routes_drop(struct basalt_vcpu *vcpu)
{
	struct route *route;

	mutex_lock(&changing);
	while ((route = find(vcpu, NULL)))
		end(route);
	mutex_unlock(&changing);
}

/**
 * basalt_routes_exit() - nothing of this is under way when it returns; there is no route any more
 */
void basalt_routes_exit(void)
{
	cancel_work_sync(&again);
}
