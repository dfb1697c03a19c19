// SPDX-License-Identifier: GPL-2.0
/*
 * Servers without a CPU of their own, as seen from CPUs that are Linux's: a
 * vCPU is frozen, others are linked to it, its user space waits for what it
 * asks, and somebody looks at its time. What enters it is switch.c.
 */
#include <linux/anon_inodes.h>
#include <linux/delay.h>
#include <linux/err.h>
#include <linux/fcntl.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/ktime.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <asm/svm.h>
#include <asm/tsc.h>

#include "compat.h"
#include "vm.h"

#define SHORTEST_US	100
#define LONGEST_US	10000000

/* So long a CPU may take to come out of a server that ends. */
#define END_LIMIT_MS	5000
#define END_AGAIN_US	200

/* Where user space of all servers waits: they ask rarely. */
static DECLARE_WAIT_QUEUE_HEAD(asked);

static atomic64_t last_id;

/**
 * basalt_servers_look() - a server may have asked something, or have ended
 */
void basalt_servers_look(void)
{
	wake_up_all(&asked);
}

static int state_of(const struct basalt_server *server)
{
	/* What was done before a step is seen by who sees the step. */
	return smp_load_acquire(&server->state);
}

/**
 * basalt_runs() - whether a vCPU runs
 * @vcpu: which
 *
 * Return: that, as of now.
 */
bool basalt_runs(const struct basalt_vcpu *vcpu)
{
	const struct basalt_server *server = READ_ONCE(vcpu->server);

	if (server)
		return READ_ONCE(server->state) == BASALT_SERVER_RUNS;
	return READ_ONCE(per_cpu(basalt_cpus, vcpu->cpu).order) == BASALT_ORDER_RUNNING;
}

/**
 * basalt_pull_once() - has a vCPU look what it is to do
 * @vcpu: which; one that runs
 */
void basalt_pull_once(const struct basalt_vcpu *vcpu)
{
	const struct basalt_server *server = READ_ONCE(vcpu->server);

	if (!server)
		basalt_send_nmi(vcpu->cpu);
	/* Pairs with bring() in switch.c: it says by then where it is. */
	else if (smp_load_acquire(&server->since))
		basalt_send_nmi(READ_ONCE(server->cpu));
}

/* A server that takes longer than it may, in the place of one whom no interrupt calls. */
static void look_at_time(struct work_struct *work)
{
	struct basalt_server *server = container_of(to_delayed_work(work), struct basalt_server, watch);
	u64 since = smp_load_acquire(&server->since);

	/* Another CPU's counter may be ahead of this one's by a little. */
	if (since && (s64)(rdtsc() - since) > (s64)server->budget) {
		/* This run, and no other that has begun meanwhile. */
		WRITE_ONCE(server->late, since);
		/* Nothing of it goes as long as it is looked at: basalt_server_end(). */
		basalt_pull_once(server->vcpu);
	}
	if (state_of(server) != BASALT_SERVER_ENDED)
		schedule_delayed_work(&server->watch, server->period);
}

static void free_server(struct kref *users)
{
	kfree(container_of(users, struct basalt_server, users));
}

/**
 * basalt_server_put() - one user less
 * @server: of which, if any
 */
void basalt_server_put(struct basalt_server *server)
{
	if (server)
		kref_put(&server->users, free_server);
}

static int release_file(struct inode *inode, struct file *file)
{
	basalt_server_put(file->private_data);
	return 0;
}

/* Nothing can be done with it but linking: whoever gets it has no part in the server itself. */
static const struct file_operations server_operations = {
	.owner = THIS_MODULE,
	.release = release_file,
	.llseek = noop_llseek,
};

static struct basalt_server *new_server(struct basalt_vcpu *vcpu, u32 budget_us)
{
	struct basalt_server *server = kzalloc(sizeof(*server), GFP_KERNEL_ACCOUNT);

	if (!server)
		return NULL;
	server->context = basalt_new_context();
	if (!server->context) {
		kfree(server);
		return NULL;
	}
	kref_init(&server->users);
	server->id = atomic64_inc_return(&last_id);
	server->state = BASALT_SERVER_WAITS;
	server->vcpu = vcpu;
	server->vm = vcpu->vm;
	spin_lock_init(&server->ending);
	server->budget = mul_u64_u64_div_u64(budget_us, tsc_khz, 1000);
	server->period = max(1UL, usecs_to_jiffies(budget_us) / 2);
	INIT_DELAYED_WORK(&server->watch, look_at_time);
	return server;
}

static bool waits(const struct basalt_vcpu *vcpu)
{
	return vcpu->answer == BASALT_EXIT_HYPERCALL && vcpu->vmcb->save.rax == BASALT_CALL_WAIT;
}

static bool is_alone(struct basalt_vm *vm)
{
	bool alone;

	mutex_lock(&vm->mapping);
	alone = list_is_singular(&vm->vcpus);
	mutex_unlock(&vm->mapping);
	return alone;
}

static struct file *new_file(struct basalt_server *server)
{
	struct file *file = anon_inode_getfile("basalt-server", &server_operations, server, O_RDWR);

	if (!IS_ERR(file))
		kref_get(&server->users);
	return file;
}

/* @vcpu's lock is held, and its machine's. Gives the file that links are made by. */
static struct file *freeze(struct basalt_vcpu *vcpu, u32 budget_us)
{
	struct basalt_vm *vm = vcpu->vm;
	struct basalt_server *server;
	struct file *file;
	long error;

	if (vcpu->lost)
		return ERR_PTR(-EIO);
	if (vcpu->server)
		return ERR_PTR(-EEXIST);
	if (vm->identity)
		return ERR_PTR(-EOPNOTSUPP);
	if (!waits(vcpu) || !is_alone(vm))
		return ERR_PTR(-EINVAL);
	server = new_server(vcpu, budget_us);
	if (!server)
		return ERR_PTR(-ENOMEM);
	file = new_file(server);
	if (IS_ERR(file)) {
		basalt_free_context(server->context);
		basalt_server_put(server);
		return file;
	}
	vcpu->job = BASALT_JOB_SAVE;
	vcpu->context = server->context;
	error = basalt_cpu_run(vcpu);
	vcpu->context = NULL;
	/* A CPU that is lost may write there for ever. */
	if (vcpu->lost) {
		fput(file);
		return ERR_PTR(error);
	}
	if (error && error != -EINTR) {
		basalt_free_context(server->context);
		basalt_server_put(server);
		fput(file);
		return ERR_PTR(error);
	}
	/* Nothing is sent to its CPU from here on; devices' interrupts would be another's, and links would be used there. */
	spin_lock(&vcpu->sending);
	WRITE_ONCE(vcpu->server, server);
	spin_unlock(&vcpu->sending);
	basalt_vcpu_hide(vcpu);
	basalt_routes_drop(vcpu);
	basalt_links_drop(vcpu);
	basalt_svm_freeze(vcpu);
	WRITE_ONCE(vcpu->flush, true);
	basalt_cpu_forget(vcpu);
	basalt_vm_leave_claim(vm);
	return file;
}

/**
 * basalt_freeze() - takes a vCPU its CPU, and lets others enter it
 * @vcpu: which
 * @user: for how long each time
 *
 * Return: a descriptor by which others are linked to it, or an error of BASALT_FREEZE.
 */
long basalt_freeze(struct basalt_vcpu *vcpu, const struct basalt_freeze __user *user)
{
	struct basalt_freeze wanted;
	struct file *file;
	int fd;

	if (copy_from_user(&wanted, user, sizeof(wanted)))
		return -EFAULT;
	if (wanted.budget_us < SHORTEST_US || wanted.budget_us > LONGEST_US ||
	    memchr_inv(wanted.reserved, 0, sizeof(wanted.reserved)))
		return -EINVAL;
	/* Once it is frozen nothing can fail any more. */
	fd = get_unused_fd_flags(O_CLOEXEC);
	if (fd < 0)
		return fd;
	if (!mutex_trylock(&vcpu->lock)) {
		put_unused_fd(fd);
		return -EBUSY;
	}
	mutex_lock(&vcpu->vm->lock);
	file = freeze(vcpu, wanted.budget_us);
	mutex_unlock(&vcpu->vm->lock);
	mutex_unlock(&vcpu->lock);
	if (IS_ERR(file)) {
		put_unused_fd(fd);
		return PTR_ERR(file);
	}
	fd_install(fd, file);
	return fd;
}

/**
 * basalt_server_asks() - whether a frozen vCPU waits for its user space
 * @vcpu: which; its lock is held, so that it stays so
 *
 * Return: that.
 */
bool basalt_server_asks(const struct basalt_vcpu *vcpu)
{
	return state_of(vcpu->server) == BASALT_SERVER_ASKS;
}

static bool has_news(const struct basalt_server *server)
{
	int state = state_of(server);

	return state == BASALT_SERVER_ASKS || state == BASALT_SERVER_ENDED;
}

/**
 * basalt_server_run() - waits until a frozen vCPU asks something, or has ended
 * @vcpu: which; its lock is held
 *
 * Return: 0, with what in its page; -EINTR after a signal.
 */
long basalt_server_run(struct basalt_vcpu *vcpu)
{
	struct basalt_server *server = vcpu->server;

	if (server->asked && state_of(server) == BASALT_SERVER_ASKS) {
		server->asked = false;
		/* What was answered is seen by whoever enters it. */
		smp_store_release(&server->state, BASALT_SERVER_PAUSED);
	}
	if (READ_ONCE(vcpu->run->immediate_exit))
		return -EINTR;
	if (wait_event_interruptible(asked, has_news(server)))
		return -EINTR;
	server->asked = true;
	return 0;
}

/* Takes it from everybody; tells whether it came. */
static bool end(struct basalt_server *server)
{
	ktime_t limit = ktime_add_ms(ktime_get(), END_LIMIT_MS);

	WRITE_ONCE(server->stop, true);
	for (;;) {
		int state = state_of(server);

		if (state != BASALT_SERVER_RUNS) {
			if (cmpxchg(&server->state, state, BASALT_SERVER_ENDED) == state)
				return true;
			continue;
		}
		if (ktime_after(ktime_get(), limit))
			return false;
		basalt_pull_once(server->vcpu);
		usleep_range(END_AGAIN_US / 2, END_AGAIN_US);
	}
}

/**
 * basalt_server_end() - nobody enters a vCPU any more
 * @vcpu: which, frozen or not; its descriptor is closed
 *
 * One that a CPU does not come out of is lost, as in claim.c.
 */
void basalt_server_end(struct basalt_vcpu *vcpu)
{
	struct basalt_server *server = vcpu->server;

	if (!server)
		return;
	if (!end(server)) {
		vcpu->lost = true;
		WRITE_ONCE(vcpu->vm->lost, true);
		__module_get(THIS_MODULE);
		pr_err(BASALT "CPU %u does not come out of a server: its memory is lost until the next boot\n",
		       READ_ONCE(server->cpu));
	}
	spin_lock(&server->ending);
	server->over = true;
	spin_unlock(&server->ending);
	cancel_delayed_work_sync(&server->watch);
	if (vcpu->lost)
		return;
	basalt_free_context(server->context);
	server->context = NULL;
}

/**
 * basalt_links_drop() - ends all links of a vCPU
 * @vcpu: which; it does not run
 */
void basalt_links_drop(struct basalt_vcpu *vcpu)
{
	unsigned int index;

	for (index = 0; index < BASALT_MAX_LINKS; index++) {
		basalt_server_put(vcpu->links[index]);
		vcpu->links[index] = NULL;
	}
}

/* @vcpu's lock is held, and @server's file. */
static long add(struct basalt_vcpu *vcpu, u32 index, struct basalt_server *server)
{
	long error = 0;

	if (vcpu->links[index])
		return -EEXIST;
	if (!vcpu->aside)
		vcpu->aside = basalt_new_context();
	if (!vcpu->aside)
		return -ENOMEM;
	spin_lock(&server->ending);
	if (server->over) {
		error = -ESRCH;
	} else if (server->vm == vcpu->vm) {
		error = -EINVAL;
	} else {
		kref_get(&server->users);
		vcpu->links[index] = server;
		/* It goes on until the server ends: whoever is linked may come and go. */
		schedule_delayed_work(&server->watch, server->period);
	}
	spin_unlock(&server->ending);
	return error;
}

static long link_to(struct basalt_vcpu *vcpu, const struct basalt_link *wanted)
{
	struct file *file;
	long error = -EINVAL;

	file = fget(wanted->server);
	if (!file)
		return -EBADF;
	if (file->f_op == &server_operations)
		error = add(vcpu, wanted->index, file->private_data);
	fput(file);
	return error;
}

/**
 * basalt_link() - lets a vCPU enter a server, or ends that
 * @vcpu: which
 * @user: which server, and by which number
 *
 * Return: 0, or an error of BASALT_LINK.
 */
long basalt_link(struct basalt_vcpu *vcpu, const struct basalt_link __user *user)
{
	struct basalt_link wanted;
	long error = 0;

	if (copy_from_user(&wanted, user, sizeof(wanted)))
		return -EFAULT;
	if (wanted.index >= BASALT_MAX_LINKS || wanted.server < -1 ||
	    memchr_inv(wanted.reserved, 0, sizeof(wanted.reserved)))
		return -EINVAL;
	if (!mutex_trylock(&vcpu->lock))
		return -EBUSY;
	if (vcpu->server || vcpu->vm->identity)
		error = -EOPNOTSUPP;
	else if (wanted.server >= 0)
		error = link_to(vcpu, &wanted);
	else if (!vcpu->links[wanted.index])
		error = -ENOENT;
	if (!error && wanted.server < 0) {
		basalt_server_put(vcpu->links[wanted.index]);
		vcpu->links[wanted.index] = NULL;
	}
	mutex_unlock(&vcpu->lock);
	return error;
}
