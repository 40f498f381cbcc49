from tyro import conf as conf
