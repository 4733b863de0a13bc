#include "rb.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

int rb_event_fd(struct rb_dev *d)
{
	int fd = rb_dev_context(d)->async_fd, flags, copy;

	if (fd < 0)
		return -ENOTSUP;
	/* The flag belongs to the open file, so ibv_get_async_event() does not block any more either. */
	flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK))
		return errno ? -errno : -EIO;
	copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	return copy >= 0 ? copy : errno ? -errno : -EIO;
}

int rb_event_get(struct rb_dev *d, struct rb_event *out)
{
	struct ibv_async_event e;

	errno = 0;
	if (ibv_get_async_event(rb_dev_context(d), &e))
		return errno ? -errno : -EIO;
	*out = (struct rb_event){ .type = e.event_type };
	switch (e.event_type) {
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
	case IBV_EVENT_GID_CHANGE:
		out->port = e.element.port_num;
		break;
	default:
		break;
	}
	/* At once: nothing of the event is kept, and a QP or CQ can't be destroyed while one of its events is not acknowledged. */
	ibv_ack_async_event(&e);
	return 0;
}
