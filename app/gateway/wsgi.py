"""What gunicorn serves: `gunicorn -c python:app.gateway.gunicorn_conf app.gateway.wsgi:app`."""

from app.gateway.gateway import create_app
from relay import log
from relay.settings import Settings

settings = Settings.from_env()
log.configure(settings.log_level)
app = create_app(settings)
